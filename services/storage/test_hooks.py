"""Faults on request, for the fault tests: files in the folder that KVTIDE_TEST_HOOKS names. Unset, nothing happens."""

import errno
import os
import time
from pathlib import Path

VARIABLE = "KVTIDE_TEST_HOOKS"
SLOW_READ = "storage_slow_read"  # content: seconds that each page read takes longer
FAIL_WRITE = "storage_fail_write"  # while it exists the disk is "full"


def before_read() -> None:
    """Called in the I/O thread before a page is read."""
    folder = os.environ.get(VARIABLE)
    if folder and (Path(folder) / SLOW_READ).exists():
        time.sleep(float((Path(folder) / SLOW_READ).read_text()))


def before_write() -> None:
    """Called in the I/O thread before a page is written. Raises OSError(ENOSPC) on request."""
    folder = os.environ.get(VARIABLE)
    if folder and (Path(folder) / FAIL_WRITE).exists():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
