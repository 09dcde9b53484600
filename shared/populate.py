"""Fills the page table of a mapped host pool ahead of its first use.

Shared memory that is allocated still costs a fault for each 4 KiB that a process touches first: that halves the speed
of a copy. The kernel does it ten times faster for a range at once, in the background and in steps.
"""

import ctypes
import errno
import logging
import threading
import time
from collections.abc import Callable

from shared.errors import SegmentError
from shared.host_layout import Bytes

MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module doesn't name it
STEP_BYTES = 4 * 2**20  # less than 1 ms, in which the map can't go
REST = 1.0  # of a step's time: half a core at most, for about 0.5 s a GiB

log = logging.getLogger("kvtide.segments")


def populate(pages: Callable[[], Bytes]) -> threading.Thread:
    """Start a thread that does it for the array that `pages` returns, uint8 [pages, page_bytes].

    The thread ends at the last page, when `pages` raises SegmentError (the segment is closed), or with a line in the
    log where the kernel can't; copies then take the faults themselves.
    """
    thread = threading.Thread(target=_populate, args=(pages,), name="populate", daemon=True)
    thread.start()
    return thread


def _populate(pages: Callable[[], Bytes]) -> None:
    done, libc = 0, ctypes.CDLL(None, use_errno=True)
    madvise = libc.madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    while True:
        begun = time.perf_counter()
        try:
            array = pages()  # held during the step only: a closed segment is unmapped when its last array goes
        except SegmentError:
            return
        size = min(STEP_BYTES, array.nbytes - done)
        if size <= 0:
            return
        if madvise(array.ctypes.data + done, size, MADV_POPULATE_WRITE):
            log.info("not_populated reason=%s", errno.errorcode.get(ctypes.get_errno(), "unknown"))
            return
        del array
        done += size
        time.sleep(REST * (time.perf_counter() - begun))
