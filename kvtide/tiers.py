"""What a stack says at its start: which tiers are on, how big they are, and why."""

import shutil
from pathlib import Path

from services.gpu_worker.model.config import read_config
from shared.config import Config
from shared.geometry import PageGeometry

MIB = 2**20


def geometry_of(config: Config) -> PageGeometry:
    """The page geometry of the configured model. Raises ModelError for a folder that can't be served."""
    model = read_config(Path(config.model.path))
    return model.page_geometry(config.cache.page_size, config.model.dtype, config.cache.host_layout)


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
    pages = max(0, cache.host_bytes // geometry.page_bytes - 1)  # page 0 is the segment's header
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
    if storage.backend not in ("file", "hash_file"):
        where = storage.address or storage.dynamic_class or "the storage process"
        return f"L3 storage  on   {storage.backend} at {where} (storage.backend)"
    folder = config.storage_folder
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    room = max(0, min(storage.quota_bytes, free - storage.free_floor_bytes))
    return (
        f"L3 storage  on   {room // geometry.token_bytes} tokens, {room / MIB:.0f} MiB of files in {folder} "
        f"({storage.backend}; the smaller of storage.quota_bytes and what the disk has above storage.free_floor_bytes)"
    )
