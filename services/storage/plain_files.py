"""One page file at a time, by calls of the operating system: what runs where the C extension isn't built."""

import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from services.storage.direct_io import fits, in_cache, move_direct
from services.storage.page_file import CorruptPageError

OPEN_TO_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a FIFO must not hold a thread
OPEN_TO_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW

Buffers = Sequence[memoryview]


def read(path: str, buffers: Buffers, call_bytes: int, touch_after_s: float) -> bool:
    """Read a file that has as many bytes as all buffers. True if that went past the kernel's cache.

    call_bytes: the most in one call of the system. A file older than `touch_after_s` gets a new time. Raises OSError,
    or CorruptPageError when it isn't that long.
    """
    size = sum(map(len, buffers))
    file = os.open(path, OPEN_TO_READ)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise CorruptPageError("it is no regular file")
        if status.st_size != size:
            raise CorruptPageError(f"the file has {status.st_size} bytes instead of {size}")
        direct = not in_cache(file, size) and _direct(os.preadv, file, buffers, call_bytes)
        if not direct:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_WILLNEED)  # a cold page in one request instead of small ones
            _whole(os.preadv, file, buffers, call_bytes)
        if time.time() - status.st_mtime > touch_after_s:
            with contextlib.suppress(OSError):  # another user's file in a shared folder; nothing depends on it
                os.utime(file)
    finally:
        os.close(file)
    return direct


def write(
    temporary: str, path: str, buffers: Buffers, call_bytes: int, *, direct: bool, fsync: bool
) -> tuple[bool, int]:
    """Write a file under a temporary name, then give it its own. fsync: and wait until the disk has both.

    direct: past the kernel's cache, where that is possible. Returns whether it was, and the bytes that the file takes.
    The temporary file is locked while its writer lives: see `disk_scan`. Raises OSError, and leaves nothing then.
    """
    try:
        file = os.open(temporary, OPEN_TO_WRITE, 0o600)
    except FileNotFoundError:
        make_folder(Path(path).parent, fsync=fsync)
        file = os.open(temporary, OPEN_TO_WRITE, 0o600)
    name = temporary
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.posix_fallocate(file, 0, sum(map(len, buffers)))
        past = direct and _direct(os.pwritev, file, buffers, call_bytes)
        if not past:
            _whole(os.pwritev, file, buffers, call_bytes)
        if fsync:
            os.fdatasync(file)
        Path(temporary).rename(path)
        name = path
        if fsync:
            sync_name(path)
        return past, allocated_bytes(os.fstat(file))
    except (OSError, CorruptPageError):
        Path(name).unlink(missing_ok=True)
        raise
    finally:
        os.close(file)


def make_folder(folder: Path, *, fsync: bool) -> None:
    """Make a folder and those above it, where they are missing. fsync: and wait until the disk has their names."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if fsync:
        for each in missing:
            sync_name(each)


def sync_name(path: str | Path) -> None:
    """Wait until the disk has the name of a file or folder."""
    folder = os.open(Path(path).parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def allocated_bytes(status: os.stat_result) -> int:
    """Bytes that a file takes on its disk; its length where compression hides that."""
    return max(status.st_blocks * 512, status.st_size)


Move = Callable[[int, list[memoryview], int], int]  # os.preadv or os.pwritev


def _direct(move: Move, file: int, buffers: Buffers, call_bytes: int) -> bool:
    """`_whole`, past the kernel's cache. False when that is impossible here."""
    return fits(buffers) and move_direct(lambda: _whole(move, file, buffers, call_bytes), file)


def _whole(move: Move, file: int, buffers: Buffers, call_bytes: int) -> None:
    """Call `move` until every buffer is done: one call may move less than asked for."""
    offset, left = 0, list(buffers)
    while left:
        parts, room = [], call_bytes
        for each in left:
            parts.append(each[:room])
            room -= len(parts[-1])
            if not room:
                break
        moved = move(file, parts, offset)
        if moved <= 0:
            raise CorruptPageError(f"the file ends at {offset}")
        offset += moved
        while left and moved >= len(left[0]):
            moved -= len(left.pop(0))
        if moved:
            left[0] = left[0][moved:]
