"""Folders that are made once: complete or absent, whoever makes them and whenever one is interrupted."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtide.file_lock import wait_for_lock
from shared.errors import CapacityError, ModelError

# A conversion takes about 10 s, on a loaded machine 60 s; a lock held for longer means a maker that hangs.
LOCK_TIMEOUT_S = 300.0

# 269 MB of weights and 4 MB of tokenizer files, and some room so that the disk isn't left at zero.
NEEDED_BYTES = 300 * 1024 * 1024

# Some writers make private files; the cache may be shared, with a container's user too.
READABLE = 0o644

# Written last: names every file with its size in bytes. A folder whose files differ from it isn't used.
MANIFEST = "kvtide-manifest.json"


def cache_root() -> Path:
    """Return the folder for what kvtide makes once: `$KVTIDE_CACHE`, `$XDG_CACHE_HOME/kvtide` or `~/.cache/kvtide`."""
    if own := os.environ.get("KVTIDE_CACHE"):
        return Path(own).expanduser().absolute()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser().absolute() / "kvtide"
    return Path.home() / ".cache" / "kvtide"


def is_complete(folder: Path) -> bool:
    """Say whether `folder` holds every file that its manifest names, at the size that it names."""
    try:
        sizes: dict[str, int] = json.loads((folder / MANIFEST).read_bytes())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def ensure_folder(target: Path, fill: Callable[[Path], None], progress: Callable[[str], None]) -> Path:
    """Return `target`, complete; where it is absent or damaged, let `fill` write its files and put them in place.

    `fill` gets a temporary folder beside `target`, which one rename makes visible after every file is on disk. One
    maker works at a time, also across processes; a temporary folder that a killed maker left is removed by the next.
    Raises ModelError when the place can't be written or a maker holds the lock for LOCK_TIMEOUT_S, CapacityError when
    the disk is too small, and what `fill` raises.
    """
    if is_complete(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_name(f"{target.name}.lock"), progress):
            if not is_complete(target):
                _make(target, fill)
    except OSError as error:
        raise ModelError(
            f"can't write the model folder {target}: {error}: make it writable, or name another in KVTIDE_CACHE"
        ) from error
    return target


def _make(target: Path, fill: Callable[[Path], None]) -> None:
    prefix = f"{target.name}.making-"
    for leftover in target.parent.glob(f"{prefix}*"):
        shutil.rmtree(leftover)
    free = shutil.disk_usage(target.parent).free
    if free < NEEDED_BYTES:
        raise CapacityError(
            f"{target.parent} has {free >> 20} MiB free, the default model needs {NEEDED_BYTES >> 20}: "
            "free some, or name another folder in KVTIDE_CACHE"
        )
    making = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        made = making / "new"
        made.mkdir()
        fill(made)
        _seal(made)
        if target.exists():  # damaged: a complete one would have been returned
            target.rename(making / "damaged")
        made.rename(target)
        _sync(target.parent)
    finally:
        shutil.rmtree(making)


def _seal(folder: Path) -> None:
    sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text(json.dumps(sizes, indent=1) + "\n")
    for file in folder.iterdir():
        file.chmod(READABLE)
        _sync(file)
    _sync(folder)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def _locked(lock: Path, progress: Callable[[str], None]) -> Iterator[None]:
    waiting = f"another process is making the default model: waiting for {lock}"
    with lock.open("a") as file:
        if not wait_for_lock(file.fileno(), LOCK_TIMEOUT_S, lambda: progress(waiting)):
            raise ModelError(
                f"{lock} was held by another process for {LOCK_TIMEOUT_S:.0f} s: end that process and try again"
            )
        yield
