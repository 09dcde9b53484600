"""Page files past the kernel's cache, where the file system and the memory allow it.

A file that isn't in that cache is read into the host pool by the disk itself: no copy, no second place in memory for
what L2 holds anyway, and little of a processor. One that is there is copied from it.
"""

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Sequence

import numpy as np

BLOCK = 4096  # bytes: a multiple of every disk's own blocks; O_DIRECT wants memory, offset and length to be multiples
O_DIRECT = getattr(os, "O_DIRECT", 0)  # 0: this system has no such thing
CACHESTAT = 451  # the system call's number on every processor; elsewhere the call fails

_syscall = ctypes.CDLL(None).syscall
_syscall.restype = ctypes.c_long


def address(buffer: memoryview) -> int:
    """Where contiguous memory begins."""
    if not buffer.readonly:
        return ctypes.addressof(ctypes.c_char.from_buffer(buffer))  # five times as fast
    return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0])


def in_cache(file: int, size: int) -> bool:
    """Is all of an open file of `size` bytes in the kernel's cache? True where it can't be told: before Linux 6.5."""
    span, found = (ctypes.c_uint64 * 2)(0, size), (ctypes.c_uint64 * 5)()
    if _syscall(CACHESTAT, file, span, found, 0) != 0:
        return True
    return found[0] >= -(-size // mmap.PAGESIZE)  # the first field counts cached pages


def fits(buffers: Sequence[memoryview]) -> bool:
    """May these buffers, one after the other from a file's beginning, go past the cache?"""
    return O_DIRECT != 0 and all(address(each) % BLOCK == 0 and len(each) % BLOCK == 0 for each in buffers)


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
