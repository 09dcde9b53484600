"""Faults on request, for the fault tests: files in the folder that KVTIDE_TEST_HOOKS names. Unset, nothing happens.

They act as long as they exist, on every page. READ and WRITE act once, as the points of the other services do.
"""

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

from shared import test_hooks
from shared.test_hooks import VARIABLE

SLOW_READ = "storage_slow_read"  # content: seconds that each page read takes longer
SLOW_WRITE = "storage_slow_write"  # the same for each write
FAIL_READ = "storage_fail_read"  # content: name of the error, "" = EIO
FAIL_WRITE = "storage_fail_write"  # content: name of the error, "" = ENOSPC: the disk is "full"
CUT_FILE = "storage_cut_file"  # each page file loses its second half before it is read
READ, WRITE = "storage_read", "storage_write"  # see shared.test_hooks

Hook = Callable[[Path], None]  # takes the page file's path


def active() -> bool:
    """Are there hooks?"""
    return bool(os.environ.get(VARIABLE))


def before_read(path: Path) -> None:
    """Called in the I/O thread before a page file is read. Raises OSError on request."""
    if folder := os.environ.get(VARIABLE):
        test_hooks.reach(READ)
        _slow(Path(folder) / SLOW_READ)
        if (Path(folder) / CUT_FILE).exists() and path.exists():
            os.truncate(path, path.stat().st_size // 2)
        _fail(Path(folder) / FAIL_READ, "EIO")


def before_write(path: Path) -> None:
    """Called in the I/O thread before a page is written. Raises OSError on request."""
    if folder := os.environ.get(VARIABLE):
        test_hooks.reach(WRITE)
        _slow(Path(folder) / SLOW_WRITE)
        _fail(Path(folder) / FAIL_WRITE, "ENOSPC")


def _slow(hook: Path) -> None:
    if hook.exists():
        time.sleep(float(hook.read_text()))


def _fail(hook: Path, otherwise: str) -> None:
    if hook.exists():
        number = getattr(errno, hook.read_text().strip() or otherwise)
        raise OSError(number, os.strerror(number))
