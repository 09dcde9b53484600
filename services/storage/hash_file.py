"""L3 in files: FOLDER/MODEL/SHARD/DIGEST.page, kept over restarts, shared by every instance that has the folder."""

import asyncio
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from services.storage.backend import Backend, BatchRead, ModelPages, check_batch
from services.storage.disk_index import MODEL_DIGITS, DiskIndex, PageKey
from services.storage.disk_room import DiskRoom
from services.storage.disk_scan import DiskScan
from services.storage.folder_notes import note_model, store_id
from services.storage.page_file import CorruptPageError, PageFormat, allocated_bytes, read_page, write_page
from services.storage.tally import Tally
from shared.errors import StorageError
from shared.geometry import PageGeometry
from shared.link import new_epoch
from shared.messages.storage import BackendInfo
from shared.segments import Checksums

COUNTED = (
    "get_pages", "get_bytes", "set_pages", "set_bytes", "miss", "evicted", "evicted_unread", "corrupt", "quarantined",
    "dropped", "remove_failed", "read_failed", "scan_failed",
)  # fmt: skip

T = TypeVar("T")

log = logging.getLogger("kvtide.storage")


class HashFileBackend(Backend):
    """The folder of all models. Page bytes move in threads, `io_threads` for reads and as many for writes.

    So a queue of writes never holds up a read.
    """

    def __init__(
        self, folder: Path, quota_bytes: int, free_floor_bytes: int, io_threads: int, *,
        verify: bool = True, direct_writes: bool = True, key: bytes = b"",
    ) -> None:  # fmt: skip
        """verify: compare checksums on a read. direct_writes: past the kernel's cache, where that is possible. key: of
        the pages, see PageFormat."""
        self._key = key
        self.folder = folder
        self.index = DiskIndex()
        self.tally = Tally()
        self.room = DiskRoom(folder, self.index, quota_bytes, free_floor_bytes, self.tally)
        self.verify, self.direct_writes = verify, direct_writes
        self.io_threads = io_threads
        self.readers = ThreadPoolExecutor(io_threads, "l3-read")
        self.writers = ThreadPoolExecutor(io_threads, "l3-write")
        self._scanner = ThreadPoolExecutor(1, "l3-scan")
        self._scan = DiskScan(folder, self.index, self.tally)
        self._quota = quota_bytes
        self._id = ""

    async def start(self) -> None:
        """Raises StorageError when the folder can't be made or read."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self.folder.stat().st_mode & 0o002:
                log.warning("folder_writable_by_all path=%s: chmod o-w, or others can plant pages", self.folder)
            self._id = await store_id(self.folder)
            await self.in_thread(self._scanner, self._scan.run)
            await self.in_thread(self._scanner, self.room.start)
        except OSError as error:
            raise StorageError(
                f"can't use the page folder {self.folder}: {error.strerror}; set storage.folder to one that is writable"
            ) from None

    @property
    def info(self) -> BackendInfo:
        return BackendInfo(f"hash_file:{self._id}", "hash_file", shared=True, persistent=True, capacity=self._quota)

    async def of_model(self, model_fingerprint: bytes, geometry: PageGeometry) -> "HashFilePages":
        try:
            await note_model(self.folder / model_name(model_fingerprint), model_fingerprint, geometry)
        except OSError as error:
            raise StorageError(
                f"can't use the page folder {self.folder}: {error.strerror}; see storage.folder"
            ) from None
        return HashFilePages(self, PageFormat(model_fingerprint, geometry, key=self._key))

    async def refresh(self) -> None:
        await self.in_thread(self._scanner, self._scan.run)

    async def clear(self) -> None:
        await self.in_thread(self._scanner, lambda: [self.room.remove(key) for key in self.index.keys_by_age()])

    def stats(self) -> dict[str, float]:
        counted = {f"l3_{name}": self.tally[name] for name in COUNTED}
        return {**counted, "l3_files": len(self.index), "l3_bytes": self.room.used, "l3_quota_bytes": self._quota}

    async def close(self) -> None:
        for executor in (self.readers, self.writers, self._scanner):
            executor.shutdown(wait=False, cancel_futures=True)

    async def in_thread(self, executor: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        """Run `work` in a thread. Cancelling the caller leaves the thread behind: only a process that ends does it."""
        return await asyncio.get_running_loop().run_in_executor(executor, work)


class PageRead(NamedTuple):
    """What became of one page."""

    checksums: Checksums | None = None  # None = a miss
    corrupt: bool = False
    failed: bool = False


class HashFilePages(ModelPages):
    """One model's files."""

    def __init__(self, store: HashFileBackend, layout: PageFormat) -> None:
        self._store = store
        self._layout = layout
        self._model = model_name(layout.model_fingerprint)
        self._process = new_epoch()
        self._serial = itertools.count()
        self._dropped = store.index.watch(self._model)

    async def batch_exists(self, digests: Sequence[bytes]) -> int:
        check_batch(digests)
        return self._store.index.use_leading(map(self._key, digests))

    async def batch_get(
        self, digests: Sequence[bytes], buffers: Sequence[memoryview], stop: threading.Event
    ) -> BatchRead:
        check_batch(digests, buffers)
        work = [partial(self._get, *each, stop) for each in zip(digests, buffers, strict=True)]
        results = await self._all(self._store.readers, work)
        return BatchRead(
            [read.checksums for read in results],
            sum(read.corrupt for read in results),
            sum(read.failed for read in results),
        )

    async def batch_set(
        self,
        digests: Sequence[bytes],
        buffers: Sequence[memoryview],
        checksums: Sequence[Checksums],
        stop: threading.Event,
    ) -> list[bool]:
        check_batch(digests, buffers, checksums)
        work = [partial(self._set, *each, stop) for each in zip(digests, buffers, checksums, strict=True)]
        return await self._all(self._store.writers, work)

    async def remove(self, digests: Sequence[bytes]) -> int:
        check_batch(digests)
        keys = [key for key in map(self._key, digests) if self._store.index.use(key)]
        return sum(await self._all(self._store.writers, [partial(self._store.room.remove, key) for key in keys]))

    def holds(self, digest: bytes) -> bool:
        return self._store.index.knows(self._key(digest))

    def take_dropped(self) -> list[bytes]:
        return self._dropped.take()

    def _key(self, digest: bytes) -> PageKey:
        return PageKey(self._model, digest)

    async def _all(self, executor: ThreadPoolExecutor, work: Sequence[Callable[[], T]]) -> list[T]:
        """Results of `work` in its order. A thread takes piece after piece: to be woken for each would take longer than
        a small page does. A caller that is cancelled leaves at most the pieces behind that have begun."""
        waiting = iter(range(len(work)))  # safe for threads: each number comes once
        results: dict[int, T] = {}

        def take() -> None:
            for at in waiting:
                results[at] = work[at]()

        threads = min(self._store.io_threads, len(work))
        calls = (self._store.in_thread(executor, take) for _ in range(threads))
        try:
            for ended in await asyncio.gather(*calls, return_exceptions=True):  # all: no thread may outlive the batch
                if isinstance(ended, BaseException):
                    raise ended
        finally:
            deque(waiting, maxlen=0)
        return [results[at] for at in range(len(work))]

    def _get(self, digest: bytes, page: memoryview, stop: threading.Event) -> PageRead:
        store, key = self._store, self._key(digest)
        if stop.is_set():
            return PageRead()
        if not store.index.use(key):
            store.tally.add("miss")
            return PageRead()
        try:
            checksums = read_page(key.path(store.folder), self._layout, digest, page, verify=store.verify)
        except FileNotFoundError:
            store.index.drop(key)
            store.tally.add("miss")
            return PageRead()
        except CorruptPageError as error:
            store.tally.note("corrupt", f"{key.path(store.folder)}: {error}")
            store.room.quarantine(key)
            return PageRead(corrupt=True)
        except OSError as error:
            store.tally.note("read_failed", error)
            return PageRead(failed=True)
        store.index.note_read(key)
        store.tally.add("get_pages")
        store.tally.add("get_bytes", self._layout.page_bytes)
        return PageRead(checksums)

    def _set(self, digest: bytes, page: memoryview, checksums: Checksums, stop: threading.Event) -> bool:
        store, key, size = self._store, self._key(digest), self._layout.file_bytes
        if stop.is_set():
            return False
        if store.index.use(key):
            return True
        path = key.path(store.folder)
        own = f"{self._process}-{next(self._serial)}"
        try:
            if not store.index.knows(key) and path.exists():  # another instance's, newer than the last scan
                store.index.add(key, allocated_bytes(path.stat()))
                return True
            write = partial(write_page, path, self._layout, digest, page, checksums, own, direct=store.direct_writes)
            store.room.store(key, size, write)
        except (OSError, StorageError) as error:
            store.tally.note("dropped", error)
            return False
        store.tally.add("set_pages")
        store.tally.add("set_bytes", self._layout.page_bytes)
        return True


def model_name(model_fingerprint: bytes) -> str:
    """Name of a model's folder."""
    return model_fingerprint.hex()[:MODEL_DIGITS]
