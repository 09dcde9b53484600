"""Which page files there are, how much they take, and which was used longest ago. In memory, safe for threads."""

import threading
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

SUFFIX = ".page"
MODEL_DIGITS = 16  # hexadecimal digits of the model fingerprint that name its folder; the header has all of it
MAX_DROPPED = 65536  # digests kept for one listener: 2 MiB, more than a store loses in the second between two looks
SHARD_DIGITS = 2  # 256 folders a model: a million files are 4,000 in each


class Shard(NamedTuple):
    """A folder of page files."""

    model: str  # MODEL_DIGITS hexadecimal digits
    digits: str  # first SHARD_DIGITS of the digests in it

    def path(self, folder: Path) -> Path:
        """Where the shard lies in the store's folder."""
        return folder / self.model / self.digits


class PageKey(NamedTuple):
    """Key of a stored page."""

    model: str  # MODEL_DIGITS hexadecimal digits of its fingerprint
    digest: bytes  # 32 bytes

    @property
    def shard(self) -> Shard:
        """The folder that the page is in."""
        return Shard(self.model, self.digest[:1].hex())

    @property
    def name(self) -> str:
        """The page's file, from the store's folder."""
        digest = self.digest.hex()
        return f"{self.model}/{digest[:SHARD_DIGITS]}/{digest}{SUFFIX}"

    def path(self, folder: Path) -> Path:
        """The page's file."""
        return folder / self.name


class Entry(NamedTuple):
    """What is known of a file."""

    size: int  # bytes that it takes
    round: int  # scan round in which it was added
    good: bool  # False: it failed its check and could not be moved away
    read: bool  # its bytes were asked for, or it was there before this process, which can't know


class DropLog:
    """Digests of one model's pages that the store has lost, oldest first, until somebody takes them."""

    def __init__(self, model: str) -> None:
        self.model = model
        self._digests: deque[bytes] = deque(maxlen=MAX_DROPPED)

    def add(self, digest: bytes) -> None:
        """Note a loss."""
        self._digests.append(digest)

    def take(self) -> list[bytes]:
        """What was noted since the last call."""
        return [self._digests.popleft() for _ in range(len(self._digests))]


class DiskIndex:
    """The files of every model, in LRU order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: OrderedDict[PageKey, Entry] = OrderedDict()
        self._shards: defaultdict[Shard, set[PageKey]] = defaultdict(set)
        self._bytes = 0
        self._round = 0
        self._logs: weakref.WeakSet[DropLog] = weakref.WeakSet()

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._entries)

    def use(self, key: PageKey) -> bool:
        """True if a good file is there; in any case the file is the most recently used from now on."""
        return self.use_leading((key,)) == 1

    def use_leading(self, keys: Iterable[PageKey]) -> int:
        """Number of leading keys with a good file. Each, and the one that ends them, is the most recently used now."""
        hits = 0
        with self._lock:
            for key in keys:
                if key not in self._entries:
                    break
                self._entries.move_to_end(key)
                if not self._entries[key].good:
                    break
                hits += 1
        return hits

    def knows(self, key: PageKey) -> bool:
        """True if a file is there, good or bad."""
        with self._lock:
            return key in self._entries

    def condemn(self, key: PageKey) -> None:
        """A file is bad and still takes its bytes: a miss until it is removed or written anew."""
        with self._lock:
            if key in self._entries:
                self._entries[key] = self._entries[key]._replace(good=False)

    def note_read(self, keys: Iterable[PageKey]) -> None:
        """The bytes of these files were read."""
        with self._lock:
            for key in keys:
                entry = self._entries.get(key)
                if entry is not None and not entry.read:
                    self._entries[key] = entry._replace(read=True)

    def was_read(self, key: PageKey) -> bool:
        """Were they ever, as far as is known?"""
        with self._lock:
            entry = self._entries.get(key)
            return entry is None or entry.read

    def add(self, key: PageKey, size: int) -> None:
        """A file was written; it replaces what was known of it."""
        with self._lock:
            self._add(key, size)

    def drop(self, key: PageKey) -> None:
        """A file is gone."""
        with self._lock:
            self._drop(key)

    def watch(self, model: str) -> DropLog:
        """Hear from now on which pages of a model go, for as long as the log is held."""
        log = DropLog(model)
        with self._lock:
            self._logs.add(log)
        return log

    def oldest(self) -> PageKey | None:
        """The file that was used longest ago."""
        with self._lock:
            return next(iter(self._entries), None)

    def keys_by_age(self) -> list[PageKey]:
        """Every file, least recently used first."""
        with self._lock:
            return list(self._entries)

    def begin_round(self) -> int:
        """A scan begins: what is added from now on may be missing from its listings, and isn't dropped for that."""
        with self._lock:
            self._round += 1
            return self._round

    def known(self, shard: Shard) -> frozenset[PageKey]:
        """The files known in a folder."""
        with self._lock:
            return frozenset(self._shards.get(shard, ()))

    def known_shards(self) -> set[Shard]:
        """The folders that hold a known file."""
        with self._lock:
            return {shard for shard, keys in self._shards.items() if keys}

    def keep_only(self, shard: Shard, listed: Iterable[PageKey], scan_round: int) -> None:
        """Drop the files of a folder that a listing of round `scan_round` doesn't have."""
        with self._lock:
            for key in self._shards.get(shard, set()).difference(listed):
                if self._entries[key].round < scan_round:
                    self._drop(key)

    def add_found(self, sizes: Mapping[PageKey, int]) -> None:
        """Add files that a scan found, in the order of their use."""
        with self._lock:
            for key, size in sizes.items():
                if key not in self._entries:
                    self._add(key, size, read=True)

    def _add(self, key: PageKey, size: int, *, read: bool = False) -> None:
        self._forget(key)
        self._entries[key] = Entry(size, self._round, good=True, read=read)
        self._shards[key.shard].add(key)
        self._bytes += size

    def _drop(self, key: PageKey) -> None:
        if self._forget(key):
            for log in self._logs:
                if log.model == key.model:
                    log.add(key.digest)

    def _forget(self, key: PageKey) -> bool:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._shards[key.shard].discard(key)
            self._bytes -= entry.size
        return entry is not None
