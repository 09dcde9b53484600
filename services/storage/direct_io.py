"""Page files past the kernel's cache, where the file system and the memory allow it.

A file that isn't in that cache is read into the host pool by the disk itself: no copy, no second place in memory for
what L2 holds anyway, and little of a processor. One that is there is copied from it.
"""

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Sequence

import numpy as np

BLOCK = 4096  # bytes: a multiple of every disk's own blocks; O_DIRECT wants memory, offset and length to be multiples
O_DIRECT = getattr(os, "O_DIRECT", 0)  # 0: this system has no such thing
NOWAIT = getattr(os, "RWF_NOWAIT", None)

_scratch = threading.local()


def block_buffer(size: int) -> memoryview:
    """Memory that begins on a block; the same one for each call of this size in this thread."""
    buffers: dict[int, memoryview] = _scratch.__dict__.setdefault("buffers", {})
    if size not in buffers:
        buffers[size] = memoryview(mmap.mmap(-1, size))
    return buffers[size]


def in_cache(file: int, size: int) -> bool:
    """Is an open file of `size` bytes in the kernel's cache, going by its last block? True where it can't be told.

    The last, since a look at any other would have the kernel read on from there.
    """
    if NOWAIT is None:
        return True
    block = bytearray(min(BLOCK, size))
    try:
        return os.preadv(file, [block], size - len(block), NOWAIT) == len(block)
    except BlockingIOError:
        return False
    except OSError:  # this file system can't tell
        return True


def forget_last_block(file: int, size: int) -> None:
    """Drop what the question `in_cache` had the kernel read."""
    os.posix_fadvise(file, max(0, size - BLOCK), BLOCK, os.POSIX_FADV_DONTNEED)


def fits(buffers: Sequence[memoryview]) -> bool:
    """May these buffers, one after the other from a file's beginning, go past the cache?"""
    arrays = [np.frombuffer(each, dtype=np.uint8) for each in buffers]
    return O_DIRECT != 0 and all(each.ctypes.data % BLOCK == 0 and each.size % BLOCK == 0 for each in arrays)


def move_direct(move: Callable[[], None], file: int) -> bool:
    """Call `move`, which reads or writes all of an open file, past the cache.

    False when the file system refuses that: then nothing that it did counts. Raises what else `move` raises.
    """
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | O_DIRECT)
        move()
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fcntl.fcntl(file, fcntl.F_SETFL, flags)
        return False
    return True
