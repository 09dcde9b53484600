"""What `kvtide doctor` looks at of the stack itself: model, port, page files, leftovers of earlier runs."""

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
from msgspec.structs import replace

from kvtide.default_model import FORMAT, MODEL_NAME
from kvtide.default_model.cache import cache_root
from kvtide.default_model.source import find_source
from kvtide.doctor_verdict import Verdict, nearest, size
from kvtide.run_folder import CHILDREN_NAME, LOCK_NAME
from kvtide.tiers import geometry_of
from services.gateway.model import Model
from shared.config import Config
from shared.errors import ModelError


def model(config: Config) -> Iterator[Verdict]:
    """The model's folder as worker and gateway read it, or the package that the default model is made from."""
    if not config.model.path:
        yield _default_model()
        return
    try:
        geometry = geometry_of(config)
        context = Model(config).context
    except ModelError as error:
        yield Verdict("fail", "model", str(error), "set model.path to a folder that docs/models.md describes")
        return
    tokens, text = config.cache.device_tokens, f"{config.model.path}, context {context} tokens"
    yield Verdict("ok", "model", f"{text}, {geometry.token_bytes:,} bytes of KV per token")
    if tokens < context:
        remedy = f"set cache.device_tokens to {context} to serve the longest, or model.max_context to {tokens}"
        yield Verdict("warn", "context", f"L1 holds {tokens} tokens: longer requests are refused", remedy)


def with_made_model(config: Config) -> Config:
    """The configuration with the default model's folder in it, where that is wanted and was made already."""
    if config.model.path:
        return config
    try:
        made = cache_root() / f"{MODEL_NAME.lower()}-{find_source().digest[:12]}-{FORMAT}"
    except ModelError:
        return config  # its package is missing: the model's line says so
    return replace(config, model=replace(config.model, path=str(made))) if (made / "config.json").exists() else config


def _default_model() -> Verdict:
    try:
        source = find_source()
    except ModelError as error:
        return Verdict("fail", "model", str(error), "run make setup, or set model.path to a folder of your own")
    there = nearest(cache_root())
    if not os.access(there, os.W_OK | os.X_OK):
        return Verdict("fail", "model", f"{there} can't be written", "set KVTIDE_CACHE to a folder of this user")
    return Verdict("ok", "model", f"{MODEL_NAME}, to be made from {source.path.name} at the first start")


def port(config: Config) -> Iterator[Verdict]:
    """Can the gateway listen?"""
    host, number = config.gateway.host, config.gateway.port
    if not number:
        yield Verdict("ok", "port", "any free one (gateway.port is 0)")
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, number))
        except OSError as error:
            if _holder(config) is not None:
                yield Verdict("ok", "port", f"{host}:{number} is taken, perhaps by this stack, which runs")
                return
            remedy = "stop what listens there, or set gateway.port to another one (0 = any free port)"
            yield Verdict("fail", "port", f"{host}:{number}: {error.strerror}", remedy)
            return
    yield Verdict("ok", "port", f"{host}:{number} is free")


def stored(config: Config) -> Iterator[Verdict]:
    """Page files that checksums have condemned."""
    bad = list((config.storage_folder / "quarantine").glob("*"))
    if bad:
        remedy = f"a disk that changes bytes should be replaced; look at {config.storage_folder / 'quarantine'}"
        yield Verdict("warn", "page files", f"{len(bad)} were found damaged and moved to quarantine", remedy)


def leftovers(config: Config) -> Iterator[Verdict]:
    """Processes and segments of a run that was killed."""
    running = _holder(config)
    if running is not None:
        what = f"the stack {config.run.name!r} runs now (process {running}): kvtide status says how it is"
        yield Verdict("ok", "earlier runs", f"{what}; another needs its own run.name and gateway.port")
        return
    orphans = list(_orphans(config.run_folder))
    if orphans:
        names = ", ".join(f"{identity} (pid {process.pid})" for identity, process in orphans)
        yield Verdict("warn", "earlier runs", f"still run without a supervisor: {names}", "kvtide serve ends them")
    dead = [path for path in Path(config.storage.segment_folder).glob("kvtide.*") if _is_free_segment(path)]
    if dead:
        total = size(sum(path.stat().st_size for path in dead))
        names = " ".join(str(path) for path in dead)
        own = all(path.name.split(".")[1] == config.run.name for path in dead)
        remedy = (
            "kvtide serve removes them" if own else f"a start under their stack's run.name removes them, or: rm {names}"
        )
        yield Verdict("warn", "earlier runs", f"{len(dead)} segments of dead processes hold {total} of memory", remedy)
    if not orphans and not dead:
        yield Verdict("ok", "earlier runs", "left nothing behind")


def _holder(config: Config) -> str | None:
    """The pid of the supervisor that holds the run folder now, as text."""
    try:
        with (config.run_folder / LOCK_NAME).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return None
    except FileNotFoundError:
        return None
    except BlockingIOError:
        return (config.run_folder / LOCK_NAME).read_text().strip() or "unknown"


def _orphans(folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    try:
        recorded = json.loads((folder / CHILDREN_NAME).read_text())
    except (OSError, ValueError):
        return  # nothing was recorded, or it was cut off
    for identity, (pid, started) in recorded.items():
        try:
            process = psutil.Process(pid)
            if abs(process.create_time() - started) < 1 and process.status() != psutil.STATUS_ZOMBIE:
                yield identity, process
        except psutil.NoSuchProcess:
            continue  # it has ended


def _is_free_segment(path: Path) -> bool:
    """A segment or its name table whose owner is dead: the owner's lock on it is gone."""
    parts = path.name.split(".")
    if len(parts) not in (4, 5) or not parts[3].isdigit() or (len(parts) == 5 and parts[4] != "names"):
        return False
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except (OSError, BlockingIOError):  # held, another user's, or gone just now
        return False
