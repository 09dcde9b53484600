"""Makes the index equal to the folder: at the start, and again for what other instances did.

Only folders whose time has changed are listed, only files that are new are looked at.
"""

import fcntl
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from services.storage.disk_index import MODEL_DIGITS, SHARD_DIGITS, SUFFIX, DiskIndex, PageKey, Shard
from services.storage.plain_files import OPEN_TO_READ, allocated_bytes
from services.storage.tally import Tally

_MODEL = re.compile(rf"[0-9a-f]{{{MODEL_DIGITS}}}")
_SHARD = re.compile(rf"[0-9a-f]{{{SHARD_DIGITS}}}")
_PAGE = re.compile(rf"[0-9a-f]{{64}}{re.escape(SUFFIX)}")

# A folder's time has the clock's resolution, seconds on some file systems: what changed this recently may change
# again unseen, so it is listed once more.
UNSETTLED_NS = 2 * 10**9


class DiskScan:
    """Remembers each folder's time. One call at a time."""

    def __init__(self, folder: Path, index: DiskIndex, tally: Tally) -> None:
        self._folder = folder
        self._index = index
        self._tally = tally
        self._seen: dict[Shard, int] = {}

    def run(self) -> None:
        """One pass over the folders; blocks, so it belongs into a thread. A folder that can't be read is counted."""
        scan_round = self._index.begin_round()
        found: list[tuple[int, PageKey, int]] = []
        present = set()
        for shard in self._shards():
            present.add(shard)
            try:
                found += self._list(shard, scan_round)
            except OSError as error:
                self._tally.note("scan_failed", error)
        for shard in self._index.known_shards() - present:
            self._seen.pop(shard, None)
            self._index.keep_only(shard, (), scan_round)
        found.sort(key=lambda item: item[0])
        self._index.add_found({key: size for _, key, size in found})

    def _shards(self) -> Iterator[Shard]:
        for model in self._folders(self._folder, _MODEL):
            for shard in self._folders(self._folder / model, _SHARD):
                yield Shard(model, shard)

    def _folders(self, folder: Path, pattern: re.Pattern[str]) -> list[str]:
        try:
            with os.scandir(folder) as entries:
                return [each.name for each in entries if pattern.fullmatch(each.name)]
        except OSError as error:
            self._tally.note("scan_failed", error)
            return []  # what can't be listed is a miss

    def _list(self, shard: Shard, scan_round: int) -> list[tuple[int, PageKey, int]]:
        path = shard.path(self._folder)
        changed = path.stat().st_mtime_ns
        if self._seen.get(shard) == changed:
            return []
        keys, found = set(), []
        known = self._index.known(shard)
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.name.endswith(".tmp"):
                    _remove_leftover(Path(entry.path))
                if not _PAGE.fullmatch(entry.name) or not entry.name.startswith(shard.digits):
                    continue
                key = PageKey(shard.model, bytes.fromhex(entry.name[:64]))
                keys.add(key)
                if key not in known:
                    try:
                        status = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue  # evicted just now
                    found.append((status.st_mtime_ns, key, allocated_bytes(status)))
        self._index.keep_only(shard, keys, scan_round)
        settled = time.time_ns() - changed > UNSETTLED_NS
        self._seen[shard] = changed if settled else 0
        return found


def _remove_leftover(path: Path) -> None:
    """Remove a temporary file whose writer is dead: a living one holds its lock."""
    try:
        file = os.open(path, OPEN_TO_READ)
    except (FileNotFoundError, PermissionError):
        return  # it has just got its name, or is another user's
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except BlockingIOError:
        return
    finally:
        os.close(file)
