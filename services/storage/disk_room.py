"""Room for page files: the quota, the free-space floor, and the quarantine of bad files."""

import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from services.storage.disk_index import DiskIndex, PageKey
from services.storage.plain_files import allocated_bytes
from services.storage.tally import Tally
from shared.errors import StorageError

QUARANTINE = "quarantine"
QUARANTINED_KEPT = 100  # enough to see what a disk does to files, and a bound on what they take
MAX_VICTIMS = 64  # files removed for one page: pages of other models may be smaller; a full disk isn't emptied at once


class DiskRoom:
    """Removes the least recently used files, bad ones first, so that usage stays within its bounds.

    Safe for threads; one of them at a time makes room.
    """

    def __init__(self, folder: Path, index: DiskIndex, quota_bytes: int, free_floor_bytes: int, tally: Tally) -> None:
        self._folder = folder
        self._index = index
        self._quota = quota_bytes
        self._floor = free_floor_bytes
        self._tally = tally
        self._lock = threading.RLock()
        self._bad: dict[Path, int] = {}  # oldest first: size
        self._reserved = 0

    @property
    def used(self) -> int:
        """Bytes of page files, good and bad."""
        return self._index.bytes + sum(self._bad.values())

    def start(self) -> None:
        """Take stock of the quarantine, and shrink to the quota. The index must be complete. Blocks."""
        with self._lock:
            quarantine = self._folder / QUARANTINE
            quarantine.mkdir(mode=0o700, exist_ok=True)
            for path in sorted(quarantine.iterdir()):
                self._bad[path] = allocated_bytes(path.lstat())
            for _ in range(len(self._bad) + len(self._index)):
                if self.used <= self._quota and len(self._bad) <= QUARANTINED_KEPT:
                    break
                self._remove_one()

    def reserve(self, size: int) -> None:
        """Make room for files of `size` bytes and keep it until `settle`. Raises StorageError if there is none."""
        with self._lock:
            self._make_room(size)
            self._reserved += size

    def settle(self, size: int, written: Mapping[PageKey, int]) -> None:
        """Give back what was reserved, and index the files that were written: the bytes that each takes."""
        with self._lock:
            self._reserved -= size
            for key, taken in written.items():
                self._index.add(key, taken)

    def quarantine(self, key: PageKey) -> None:
        """Move a bad file out of the way; where that fails it is condemned to be a miss."""
        path = key.path(self._folder)
        target = self._folder / QUARANTINE / f"{time.time_ns()}-{key.model}-{path.name}"
        with self._lock:
            try:
                path.rename(target)
                self._bad[target] = allocated_bytes(target.lstat())
            except FileNotFoundError:
                self._index.drop(key)
                return
            except OSError as error:
                self._tally.note("remove_failed", error)
                self._index.condemn(key)
                return
            self._index.drop(key)
            self._tally.add("quarantined")
            if len(self._bad) > QUARANTINED_KEPT:
                self._remove_bad()

    def remove(self, key: PageKey) -> bool:
        """Remove a page's file. False, and counted, when it can't be; it is then the last to be tried again."""
        try:
            key.path(self._folder).unlink(missing_ok=True)
        except OSError as error:
            self._tally.note("remove_failed", error)
            self._index.use(key)
            return False
        self._index.drop(key)
        return True

    def _make_room(self, size: int) -> None:
        if size <= self._quota:
            for _ in range(MAX_VICTIMS):
                if self._fits(size):
                    return
                if not self._remove_one():
                    break
        raise StorageError(
            f"no room for {size} bytes in {self._folder}: {self.used} of {self._quota} are used, {self._floor} stay "
            "free; raise storage.quota_bytes or lower storage.free_floor_bytes"
        )

    def _fits(self, size: int) -> bool:
        if self.used + self._reserved + size > self._quota:
            return False
        disk = os.statvfs(self._folder)
        return disk.f_bavail * disk.f_frsize - self._reserved - size >= self._floor

    def _remove_one(self) -> bool:
        if self._bad and self._remove_bad():
            return True
        key = self._index.oldest()
        if key is None:
            return False
        was_read = self._index.was_read(key)
        if self.remove(key):
            self._tally.add("evicted")
            self._tally.add("evicted_unread", not was_read)
        return True

    def _remove_bad(self) -> bool:
        path = next(iter(self._bad))
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            self._tally.note("remove_failed", error)
            self._bad[path] = self._bad.pop(path)
            return False
        del self._bad[path]
        return True
