"""Files of host-pool segments: their names, the locks that say who lives, and what dead processes left.

All in one folder; NAME = kvtide.STACK.STORAGE.EPOCH:
    NAME                 pages x page_bytes; page 0 holds the header; its owner holds an flock on it
    NAME.names           pages x name_bytes; the storage is its only writer
    NAME.ID.EPOCH.lock   one for each process that maps it, held with flock while it does

A lock file appears locked and is unlinked before it is unlocked, so that a free one means: its process is dead.
"""

import fcntl
import mmap
import os
import re
from pathlib import Path
from typing import NamedTuple

from shared.errors import SegmentError
from shared.messages.storage import Holder

_SAFE = re.compile(r"[A-Za-z0-9_-]{1,64}")  # a part of a file name: no separator, and all parts stay below 255 bytes


class StaleSegment(NamedTuple):
    """A segment of an earlier process of a storage, whose memory somebody still maps."""

    epoch: int  # ns since 1970
    size: int  # bytes


class Holders(NamedTuple):
    """Who maps the segments of a storage."""

    held: list[Holder]
    exited: list[Holder]  # processes that have died since the last call


def segment_path(folder: Path, stack_name: str, storage_id: str, epoch: int) -> Path:
    """Path of a segment. Raises SegmentError when a name has other characters than letters, digits, - and _."""
    return folder / f"{_prefix(stack_name, storage_id)}{epoch}"


def names_path(path: Path) -> Path:
    """Path of the name table of the segment at `path`."""
    return path.with_name(f"{path.name}.names")


def lock_path(path: Path, identity: str, epoch: int) -> Path:
    """Path of the lock file of a process that maps the segment at `path`. Raises SegmentError as `segment_path`."""
    return path.with_name(f"{path.name}.{_safe(identity)}.{epoch}.lock")


def list_holders(folder: Path, stack_name: str, storage_id: str) -> Holders:
    """The processes that map any segment of this storage. Lock files of dead processes are removed.

    Each lock is tried through a file opened anew: within one process, too, only that sees another's flock.
    """
    holders = Holders([], [])
    for path in sorted(folder.glob(f"{_prefix(stack_name, storage_id)}*.lock")):
        segment_epoch, identity, epoch = path.name.split(".")[3:6]
        holder = Holder(identity, int(epoch), int(segment_epoch))
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # unmapped just now
        except PermissionError:
            holders.held.append(holder)  # another user's process: in doubt it lives
            continue
        try:
            if not _try_lock(file):
                holders.held.append(holder)
            elif os.fstat(file).st_nlink:  # else unmapped just now: unlinked before it was unlocked
                path.unlink(missing_ok=True)
                holders.exited.append(holder)
        finally:
            os.close(file)
    return holders


def remove_stale_segments(folder: Path, stack_name: str, storage_id: str) -> list[StaleSegment]:
    """Remove what earlier processes of this storage left. Returns the segments that others still map.

    Raises SegmentError when such a storage process still lives.
    """
    held = {holder.segment_epoch for holder in list_holders(folder, stack_name, storage_id).held}
    stale = []
    for path in sorted(folder.glob(f"{_prefix(stack_name, storage_id)}*")):
        epoch, *kind = path.name.split(".")[3:]
        if kind[-1:] in (["lock"], ["tmp"]):
            continue  # of a process that lives or is about to
        with path.open("rb") as file:
            if not _try_lock(file.fileno()):
                raise SegmentError(
                    f"a storage {storage_id!r} of the stack {stack_name!r} is running (it holds {path}): stop it, or "
                    "give this stack another run.name"
                )
            if not kind and int(epoch) in held:
                stale.append(StaleSegment(int(epoch), os.fstat(file.fileno()).st_size))
        path.unlink(missing_ok=True)
    return stale


def allocate(path: Path, size: int) -> mmap.mmap:
    """Create, lock and map a file of `size` bytes, all of them allocated: no later write can fail for want of memory.

    Raises OSError.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the map keeps a duplicate of `file`, and so the lock
        os.posix_fallocate(file, 0, size)
        return mmap.mmap(file, size)
    finally:
        os.close(file)


def open_map(path: Path, size: int, *, writable: bool) -> mmap.mmap:
    """Map an existing file. Raises OSError, or SegmentError when it has another size."""
    file = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        found = os.fstat(file).st_size
        if found != size:  # a map beyond a file's end is a SIGBUS at the first touch
            raise SegmentError(f"{path.name} has {found} bytes instead of {size}")
        return mmap.mmap(file, size, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
    finally:
        os.close(file)


def hold_lock(path: Path) -> int:
    """Make the lock file and hold it: the open file. Raises OSError, FileExistsError when it is held already."""
    hidden = path.with_name(f"{path.name}.tmp")
    file = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.link(hidden, path)  # the name appears with its lock held
    except OSError:
        os.close(file)
        raise
    finally:
        hidden.unlink(missing_ok=True)
    return file


def release_lock(path: Path, file: int) -> None:
    """Remove the lock file and give the lock up, in this order."""
    path.unlink(missing_ok=True)
    os.close(file)


def _safe(part: str) -> str:
    if not _SAFE.fullmatch(part):
        raise SegmentError(f"identity {part!r} can't be part of a file name: use letters, digits, - and _, at most 64")
    return part


def _prefix(stack_name: str, storage_id: str) -> str:
    return f"kvtide.{_safe(stack_name)}.{_safe(storage_id)}."


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
