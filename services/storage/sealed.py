"""A backend out of a `KeyValueStore`: each value is a sealed page, a header with checksums and then the bytes.

Values are copied between the host pool and memory of their own, so that a call which outlives its deadline, in a thread
that can't be stopped, reads and writes no host page any more.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from services.storage.backend import Backend, BatchRead, ModelPages, StoreLostError, check_batch
from services.storage.key_value import KeyValueStore, Value, key_of
from services.storage.page_file import CorruptPageError, PageFormat
from services.storage.tally import Tally
from shared.errors import StorageError
from shared.geometry import PageGeometry
from shared.link import new_epoch
from shared.messages.storage import BackendInfo
from shared.segments import Checksums

HEADER_BLOCK = 64  # a header fills whole cache lines; the 4096 of a file would double the size of a small page
CALL_BYTES = 32 * 2**20  # values in one call of the store: 8 pages of most models, and 0.1 s at 300 MB/s
COUNTED = (
    "get_pages", "get_bytes", "set_pages", "set_bytes", "miss", "corrupt", "dropped", "remove_failed", "timed_out",
    "call_failed",
)  # fmt: skip

T = TypeVar("T")


class SealedBackend(Backend):
    """`kind` is the name in the configuration; `verify` False leaves the bytes unchecked, for the oracle's tests."""

    def __init__(
        self,
        kind: str,
        store: KeyValueStore,
        timeout_s: float,
        io_threads: int,
        *,
        verify: bool = True,
        key: bytes = b"",
    ) -> None:
        self.kind = kind
        self.store = store
        self.verify = verify
        self._key = key
        self.tally = Tally()
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(io_threads, "l3-seal")
        self._id = f"{kind}:{store.store_id or new_epoch()}"

    async def start(self) -> None:
        await self.call(self.store.start())

    @property
    def info(self) -> BackendInfo:
        store = self.store
        return BackendInfo(self._id, self.kind, store.shared, store.persistent, store.capacity)

    async def of_model(self, model_fingerprint: bytes, geometry: PageGeometry) -> "SealedPages":
        layout = PageFormat(model_fingerprint, geometry, HEADER_BLOCK, self._key)
        self.store.expect(model_fingerprint.hex(), layout.file_bytes)
        return SealedPages(self, layout)

    async def refresh(self) -> None:
        await self.call(self.store.start())

    async def clear(self) -> None:
        await self.call(self.store.clear())

    def stats(self) -> dict[str, float]:
        return {**{f"l3_{name}": self.tally[name] for name in COUNTED}, **self.store.stats()}

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self.store.close()

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Await a call of the store. Raises StoreLostError when it fails or takes too long."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await work
        except TimeoutError:
            self.tally.note("timed_out", f"no answer within {self._timeout_s} s")
            raise StoreLostError(f"{self.kind}: no answer within {self._timeout_s} s; see storage.timeout_s") from None
        except StorageError as error:
            self.tally.note("call_failed", error)
            raise
        except Exception as error:  # a user's class may raise whatever it likes
            self.tally.note("call_failed", repr(error))
            raise StoreLostError(f"{self.kind}: {error!r}") from error

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread: it moves page bytes."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


class SealedPages(ModelPages):
    """One model's values."""

    def __init__(self, backend: SealedBackend, layout: PageFormat) -> None:
        self._backend = backend
        self._store = backend.store
        self._layout = layout
        self._step = max(1, CALL_BYTES // layout.file_bytes)  # pages in a call

    async def batch_exists(self, digests: Sequence[bytes]) -> int:
        check_batch(digests)
        if not digests:
            return 0
        found = await self._backend.call(self._store.exists(self._keys(digests)))
        return min(max(int(found), 0), len(digests))

    async def batch_get(
        self, digests: Sequence[bytes], buffers: Sequence[memoryview], stop: threading.Event
    ) -> BatchRead:
        check_batch(digests, buffers)
        result: list[Checksums | None] = []
        corrupt = 0
        for step in self._steps(len(digests)):
            if stop.is_set():
                break
            try:
                read = await self._get(digests[step], buffers[step])
            except StoreLostError:
                return BatchRead(result + [None] * (len(digests) - len(result)), corrupt, len(digests) - len(result))
            result += read.checksums
            corrupt += read.corrupt
        return BatchRead(result + [None] * (len(digests) - len(result)), corrupt)

    async def batch_set(
        self,
        digests: Sequence[bytes],
        buffers: Sequence[memoryview],
        checksums: Sequence[Checksums],
        stop: threading.Event,
    ) -> list[bool]:
        check_batch(digests, buffers, checksums)
        result: list[bool] = []
        for step in self._steps(len(digests)):
            if stop.is_set():
                break
            result += await self._set(digests[step], buffers[step], checksums[step])
        return result + [False] * (len(digests) - len(result))

    async def remove(self, digests: Sequence[bytes]) -> int:
        check_batch(digests)
        return int(await self._backend.call(self._store.remove(self._keys(digests)))) if digests else 0

    async def _get(self, digests: Sequence[bytes], buffers: Sequence[memoryview]) -> BatchRead:
        tally, keys = self._backend.tally, self._keys(digests)
        values = await self._backend.call(self._store.get(keys, self._layout.file_bytes))
        self._check_answer("get", values, keys)
        opened = await self._backend.in_thread(lambda: self._open_all(digests, values, buffers))
        bad = [key for key, each in zip(keys, opened, strict=True) if isinstance(each, CorruptPageError)]
        result = [None if isinstance(each, CorruptPageError) else each for each in opened]
        if bad:
            tally.note("corrupt", next(each for each in opened if isinstance(each, CorruptPageError)))
            tally.add("corrupt", len(bad) - 1)
            await self._forget(bad)
        read = sum(each is not None for each in result)
        tally.add("get_pages", read)
        tally.add("get_bytes", read * self._layout.page_bytes)
        tally.add("miss", len(keys) - read - len(bad))
        return BatchRead(result, len(bad))

    async def _set(
        self, digests: Sequence[bytes], buffers: Sequence[memoryview], checksums: Sequence[Checksums]
    ) -> list[bool]:
        tally, keys = self._backend.tally, self._keys(digests)
        work = list(zip(digests, buffers, checksums, strict=True))
        values = await self._backend.in_thread(lambda: [self._seal(*each) for each in work])
        answer = await self._backend.call(self._store.set(keys, values))
        self._check_answer("set", answer, keys)
        stored = [bool(each) for each in answer]
        tally.add("set_pages", sum(stored))
        tally.add("set_bytes", sum(stored) * self._layout.page_bytes)
        tally.add("dropped", len(keys) - sum(stored))
        return stored

    async def _forget(self, keys: Sequence[str]) -> None:
        """Remove what is damaged: many stores keep the value that they have when it is set again."""
        try:
            await self._backend.call(self._store.remove(keys))
        except StorageError as error:
            self._backend.tally.note("remove_failed", error)

    def _check_answer(self, method: str, answer: object, keys: Sequence[str]) -> None:
        if not isinstance(answer, Sequence) or len(answer) != len(keys):
            raise StoreLostError(f"{self._backend.kind}: {method} of {len(keys)} keys answered {answer!r:.80}")

    def _seal(self, digest: bytes, page: memoryview, checksums: Checksums) -> bytearray:
        value = bytearray(self._layout.header(digest, checksums, page))
        value += page
        return value

    def _open_all(
        self, digests: Sequence[bytes], values: Sequence[Value | None], buffers: Sequence[memoryview]
    ) -> list[Checksums | CorruptPageError | None]:
        opened: list[Checksums | CorruptPageError | None] = []
        for digest, value, page in zip(digests, values, buffers, strict=True):
            try:
                opened.append(None if value is None else self._open(digest, value, page))
            except CorruptPageError as error:
                opened.append(error)
        return opened

    def _open(self, digest: bytes, stored: Value, page: memoryview) -> Checksums:
        layout = self._layout
        try:
            value = memoryview(stored).cast("B")
        except TypeError as error:
            raise CorruptPageError(f"the value is no bytes but {type(stored).__name__}") from error
        if len(value) != layout.file_bytes:
            raise CorruptPageError(f"the value has {len(value)} bytes instead of {layout.file_bytes}")
        header = bytes(value[: layout.header_bytes])
        checksums = layout.checksums_in(header, digest)
        page[:] = value[layout.header_bytes :]
        layout.check_origin(header, page)
        if self._backend.verify:
            layout.verify(page, checksums)
        return checksums

    def _keys(self, digests: Sequence[bytes]) -> list[str]:
        return [key_of(self._layout.model_fingerprint, digest) for digest in digests]

    def _steps(self, count: int) -> list[slice]:
        return [slice(start, start + self._step) for start in range(0, count, self._step)]
