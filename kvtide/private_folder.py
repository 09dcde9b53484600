"""A folder for one command's stack, removed at its end; what a killed command left is removed by the next."""

import fcntl
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK_NAME = "owner.lock"  # held with flock while its command lives
NEW_S = 60.0  # a folder without a lock that is younger may be about to get one


@contextmanager
def private_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """A new folder in `parent`, else the temporary directory; its name starts with `prefix` and suits as a stack's."""
    for left in (parent or Path(tempfile.gettempdir())).glob(f"{prefix}*"):
        if _abandoned(left):
            shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        with (folder / LOCK_NAME).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _abandoned(folder: Path) -> bool:
    try:
        with (folder / LOCK_NAME).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except FileNotFoundError:
        return folder.is_dir() and time.time() - folder.stat().st_mtime > NEW_S
    except OSError:  # held, or another user's
        return False
