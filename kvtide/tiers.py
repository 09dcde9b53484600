"""What a stack says at its start: which tiers are on, how big they are, and why."""

import json
import shutil
from pathlib import Path
from typing import Any

from shared.config import Config
from shared.errors import ModelError
from shared.geometry import PageGeometry, Part

MIB = 2**20


def geometry_of(config: Config) -> PageGeometry:
    """The page geometry that the model's `config.json` implies. Raises ModelError when it can't be read."""
    path = Path(config.model.path) / "config.json"
    try:
        model: dict[str, Any] = json.loads(path.read_bytes())
        layers, attention_heads = int(model["num_hidden_layers"]), int(model["num_attention_heads"])
        heads = int(model.get("num_key_value_heads") or attention_heads)
        head_dim = int(model.get("head_dim") or model["hidden_size"] // attention_heads)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"can't read the model's numbers from {path}: {error!r}; is model.path a model folder?"
        ) from None
    parts = tuple(Part(name, heads, head_dim, config.model.dtype) for name in ("k", "v"))
    return PageGeometry(config.cache.page_size, layers, parts)


def describe_tiers(config: Config) -> list[str]:
    """One line for each tier."""
    return [_device(config), _host(config), _storage(config)]


def _device(config: Config) -> str:
    cache, geometry = config.cache, geometry_of(config)
    return (
        f"L1 device   on   {cache.device_tokens} tokens, {cache.device_tokens * geometry.token_bytes / MIB:.0f} MiB "
        f"of {config.model.dtype} in pages of {cache.page_size} (cache.device_tokens, cache.page_size)"
    )


def _host(config: Config) -> str:
    cache, geometry = config.cache, geometry_of(config)
    if not cache.host_bytes:
        return "L2 host     off  cache.host_bytes is 0"
    pages = cache.host_bytes // geometry.page_bytes
    return (
        f"L2 host     on   {pages * cache.page_size} tokens, {cache.host_bytes / MIB:.0f} MiB "
        f"in {config.storage.segment_folder}, {cache.write_policy} (cache.host_bytes)"
    )


def _storage(config: Config) -> str:
    storage, geometry = config.storage, geometry_of(config)
    if storage.backend == "none":
        return "L3 storage  off  storage.backend is none"
    if not config.cache.host_bytes:
        return "L3 storage  off  it is filled through L2, which is off"
    folder = config.storage_folder
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    room = max(0, min(storage.quota_bytes, free - storage.free_floor_bytes))
    return (
        f"L3 storage  on   {room // geometry.token_bytes} tokens, {room / MIB:.0f} MiB of files in {folder} "
        f"({storage.backend}; the smaller of storage.quota_bytes and what the disk has above storage.free_floor_bytes)"
    )
