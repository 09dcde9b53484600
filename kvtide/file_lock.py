"""A lock between processes, which the kernel drops with its holder: a killed one blocks nobody."""

import fcntl
import time
from collections.abc import Callable

POLL_S = 0.1  # flock can wait, but not with a deadline


def wait_for_lock(fd: int, timeout_s: float, waiting: Callable[[], None]) -> bool:
    """Lock an open file or folder until it is closed. Calls `waiting` once where another holds it; False when that one
    still does after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    if _try_lock(fd):
        return True
    waiting()
    while time.monotonic() < deadline:
        time.sleep(POLL_S)
        if _try_lock(fd):
            return True
    return False


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
