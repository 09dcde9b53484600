"""L3 in files: FOLDER/MODEL/SHARD/DIGEST.page, kept over restarts, shared by every instance that has the folder."""

import asyncio
import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from services.storage.backend import Backend, BatchRead, ModelPages, check_batch
from services.storage.disk_index import MODEL_DIGITS, SUFFIX, DiskIndex, PageKey
from services.storage.disk_room import DiskRoom
from services.storage.disk_scan import DiskScan
from services.storage.folder_notes import note_model, store_id
from services.storage.page_batch import DAMAGED, DEFAULT, DONE, FAILED, GONE, SKIPPED, THERE, PageBatch, Policy
from services.storage.page_file import PageFormat
from services.storage.plain_files import allocated_bytes, make_folder
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
        policy: Policy = DEFAULT, key: bytes = b"",
    ) -> None:  # fmt: skip
        """key: of the pages, see PageFormat."""
        self._key = key
        self.folder = folder
        self.index = DiskIndex()
        self.tally = Tally()
        self.room = DiskRoom(folder, self.index, quota_bytes, free_floor_bytes, self.tally)
        self.policy = policy
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
            await self.in_thread(self._scanner, partial(make_folder, self.folder, fsync=self.policy.fsync))
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
            folder = self.folder / model_name(model_fingerprint)
            await self.in_thread(self._scanner, partial(make_folder, folder, fsync=self.policy.fsync))
            await note_model(folder, model_fingerprint, geometry)
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
        if not digests:
            return BatchRead([], 0)
        keys = [*map(self._key, digests)]
        batch = PageBatch(self._layout, self._paths(keys), digests, buffers, self._store.policy)
        await self._all(self._store.readers, batch, partial(self._get, keys, batch), stop)
        return BatchRead(batch.checksums(), batch.count(DAMAGED), batch.count(FAILED))

    async def batch_set(
        self,
        digests: Sequence[bytes],
        buffers: Sequence[memoryview],
        checksums: Sequence[Checksums],
        stop: threading.Event,
    ) -> list[bool]:
        check_batch(digests, buffers, checksums)
        if not digests:
            return []
        keys = [*map(self._key, digests)]
        paths = self._paths(keys)
        own = [f"{path.removesuffix(SUFFIX)}.{self._process}-{next(self._serial)}.tmp" for path in paths]
        batch = PageBatch(self._layout, paths, digests, buffers, self._store.policy, checksums, own)
        await self._all(self._store.writers, batch, partial(self._set, keys, batch), stop)
        return [outcome in (DONE, SKIPPED) for outcome in batch.outcomes]

    async def remove(self, digests: Sequence[bytes]) -> int:
        check_batch(digests)
        store = self._store
        keys = [key for key in map(self._key, digests) if store.index.use(key)]
        return await store.in_thread(store.writers, lambda: sum(map(store.room.remove, keys)))

    def holds(self, digest: bytes) -> bool:
        return self._store.index.knows(self._key(digest))

    def take_dropped(self) -> list[bytes]:
        return self._dropped.take()

    def _key(self, digest: bytes) -> PageKey:
        return PageKey(self._model, digest)

    def _paths(self, keys: Sequence[PageKey]) -> list[str]:
        return [f"{self._store.folder}/{key.name}" for key in keys]

    async def _all(
        self, executor: ThreadPoolExecutor, batch: PageBatch, move: Callable[[int, int], int], stop: threading.Event
    ) -> None:
        """`move` all pages of a batch. A thread takes slice after slice: to be woken for each would take longer than a
        small page does. A caller that is cancelled leaves at most the pages behind that have begun."""
        slices = iter(batch.slices(self._store.io_threads))  # safe for threads: each comes once

        def take() -> None:
            for first, last in slices:
                while first < last:
                    if stop.is_set() or batch.stopped:
                        return
                    first = move(first, last)

        threads = min(self._store.io_threads, len(batch))
        calls = (self._store.in_thread(executor, take) for _ in range(threads))
        try:
            for ended in await asyncio.gather(*calls, return_exceptions=True):  # all: no thread may outlive the batch
                if isinstance(ended, BaseException):
                    raise ended
        finally:
            batch.stop()

    def _get(self, keys: Sequence[PageKey], batch: PageBatch, first: int, last: int) -> int:
        """Read a slice. Returns the first page that it didn't come to."""
        index, outcomes = self._store.index, batch.outcomes
        for at in range(first, last):
            if not index.use(keys[at]):
                outcomes[at] = SKIPPED
        end = batch.read(first, last)
        done = []
        for at in range(first, end):
            if outcomes[at] == DONE:
                done.append(keys[at])
            else:
                self._note_miss(keys[at], batch, at)
        index.note_read(done)
        self._store.tally.add("get_pages", len(done))
        self._store.tally.add("get_bytes", len(done) * self._layout.page_bytes)
        return end

    def _note_miss(self, key: PageKey, batch: PageBatch, at: int) -> None:
        """Count a page that wasn't read, and put its file out of the way if that is bad."""
        store, outcome = self._store, batch.outcomes[at]
        if outcome == GONE:
            store.index.drop(key)
        if outcome in (GONE, SKIPPED):
            store.tally.add("miss")
        elif outcome in DAMAGED:
            store.tally.note("corrupt", f"{key.path(store.folder)}: {batch.error(at)}")
            store.room.quarantine(key)
        elif outcome in FAILED:
            store.tally.note("read_failed", batch.error(at))

    def _set(self, keys: Sequence[PageKey], batch: PageBatch, first: int, last: int) -> int:
        """Write a slice, or as much of it as there is room for. Returns the first page that it didn't come to."""
        store, outcomes, size = self._store, batch.outcomes, self._layout.file_bytes
        wanted = []
        for at in range(first, last):
            if store.index.use(keys[at]):
                outcomes[at] = SKIPPED
            else:
                wanted.append(at)
                batch.replaces[at] = store.index.knows(keys[at])  # and it is bad
        if not wanted:
            return last
        try:
            wanted, last = self._reserve(wanted, last)
        except (OSError, StorageError) as error:
            store.tally.note("dropped", error)
            return wanted[0] + 1
        end = first
        try:
            end = batch.write(first, last)
        finally:
            written = {keys[at]: batch.lengths[at] for at in wanted if outcomes[at] == DONE}
            store.room.settle(len(wanted) * size, written)
        done = 0
        for at in range(first, end):
            done += outcomes[at] == DONE
            if outcomes[at] == THERE:  # another instance's, newer than the last scan
                outcomes[at] = self._adopt(keys[at])
            elif outcomes[at] == GONE or outcomes[at] in FAILED:  # GONE: its folder
                store.tally.note("dropped", batch.error(at))
        store.tally.add("set_pages", done)
        store.tally.add("set_bytes", done * self._layout.page_bytes)
        return end

    def _reserve(self, wanted: list[int], last: int) -> tuple[list[int], int]:
        """Room for the pages of a slice that ends at `last`, or for the first alone: it may be what makes room for the
        next. Returns those that have it and the slice's new end. Raises what `DiskRoom.reserve` does."""
        room, size = self._store.room, self._layout.file_bytes
        try:
            room.reserve(len(wanted) * size)
        except StorageError:
            room.reserve(size)
            return wanted[:1], wanted[0] + 1
        return wanted, last

    def _adopt(self, key: PageKey) -> int:
        """Index a file that another instance wrote. Returns its outcome."""
        try:
            self._store.index.add(key, allocated_bytes(key.path(self._store.folder).lstat()))
        except OSError as error:  # it was removed at once
            self._store.tally.note("dropped", error)
            return GONE
        return SKIPPED


def model_name(model_fingerprint: bytes) -> str:
    """Name of a model's folder."""
    return model_fingerprint.hex()[:MODEL_DIGITS]
