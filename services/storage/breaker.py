"""The circuit breaker (STORE-07): a store that fails again and again is left alone, and tried again with back-off.

While it is detached every page is a miss, at once. The trial is `refresh`, which costs no request anything.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar
from weakref import WeakSet

from services.storage.backend import Backend, BatchRead, ModelPages, StoreLostError
from services.storage.latency import Latency
from services.storage.none_backend import NoPages
from shared.errors import StorageError
from shared.geometry import PageGeometry
from shared.messages.storage import BackendInfo
from shared.segments import Checksums

FAILURES_IN_A_ROW = 3  # a lost packet or one slow read is no reason; three deadlines are felt by users
FIRST_BACK_OFF_S = 1.0  # a restarted server is back at the first or second REFRESH_S
LONGEST_BACK_OFF_S = 60.0  # a store that is repaired after hours is used again within a minute
OVERDUE = 2  # a batch takes a few calls of the store: beyond this many deadlines it hangs

T = TypeVar("T")

log = logging.getLogger("kvtide.storage")


class Breaker:
    """Counts failures in a row. Belongs to the event loop."""

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.attached = True
        self.by_hand = False  # an administrator has detached it
        self.failures = 0
        self.detached = 0  # times
        self.refused = 0  # batches
        self.limit_s = OVERDUE * timeout_s
        self._clock = clock
        self._in_a_row = 0
        self._back_off_s = FIRST_BACK_OFF_S
        self._retry_s = 0.0

    def due(self) -> bool:
        """True when a detached store may be tried again."""
        return not self.attached and not self.by_hand and self._clock() >= self._retry_s

    async def guard(
        self,
        work: Awaitable[T],
        otherwise: T,
        failure_of: Callable[[T], str] = lambda result: "",
        *,
        may_queue: bool = False,
    ) -> T:
        """Await one batch. It failed if it raises StorageError, when `otherwise` is the result, or if `failure_of`
        its result says why; and at the moment when it is overdue, whatever becomes of it, unless it `may_queue`.
        """
        overdue = asyncio.Event()
        timer = None if may_queue else asyncio.get_running_loop().call_later(self.limit_s, self._overdue, overdue)
        try:
            result = await work
            failure = failure_of(result)
        except StorageError as error:
            result, failure = otherwise, str(error)
        finally:
            if timer:
                timer.cancel()
        if not overdue.is_set():
            self.note(failure)
        return result

    def note(self, failure: str) -> None:
        """A batch ended; `failure` says why it failed, empty = it didn't. A detached store that answers stays so."""
        if failure:
            self.failures += 1
            self._in_a_row += 1
            if self.attached and self._in_a_row >= FAILURES_IN_A_ROW:
                self.detach(failure)
        elif self.attached:
            self._in_a_row, self._back_off_s = 0, FIRST_BACK_OFF_S

    def detach(self, reason: str) -> None:
        """Leave the store alone for the back-off, which doubles until a batch succeeds."""
        if self.attached:
            self.detached += 1
            log.warning("l3_detached back_off_s=%.0f detail=%s", self._back_off_s, reason)
        self.attached = False
        self._retry_s = self._clock() + self._back_off_s
        self._back_off_s = min(2 * self._back_off_s, LONGEST_BACK_OFF_S)

    def attach(self) -> None:
        """The trial worked. The next failure detaches again."""
        self.attached, self.by_hand, self._in_a_row = True, False, FAILURES_IN_A_ROW - 1
        log.info("l3_attached")

    def _overdue(self, overdue: asyncio.Event) -> None:
        overdue.set()
        self.note(f"a batch takes longer than {self.limit_s} s")


class BreakerBackend(Backend):
    """Any backend behind a breaker."""

    def __init__(self, inner: Backend, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.inner = inner
        self.breaker = Breaker(timeout_s, clock)
        self.gets = Latency("l3_get", clock)
        self.sets = Latency("l3_set", clock)
        self._unopened: WeakSet[BreakerPages] = WeakSet()  # of which the store has not said yet where they are

    async def start(self) -> None:
        """A store that isn't there yet is detached from the beginning."""
        try:
            await self.inner.start()
        except StoreLostError as error:
            self.breaker.failures += 1
            self.breaker.detach(str(error))

    @property
    def info(self) -> BackendInfo:
        return self.inner.info

    async def of_model(self, model_fingerprint: bytes, geometry: PageGeometry) -> "BreakerPages":
        """Of a store that is lost or too late, misses until a trial works."""
        pages = BreakerPages(
            lambda: self.inner.of_model(model_fingerprint, geometry), self.breaker, self.gets, self.sets
        )
        try:
            await pages.open()
        except StoreLostError as error:
            self._unopened.add(pages)
            self.breaker.failures += 1
            self.breaker.detach(str(error))
        return pages

    async def _try(self) -> None:
        """Raises StorageError when the store doesn't work."""
        await self.inner.refresh()
        for pages in list(self._unopened):
            await pages.open()
            self._unopened.discard(pages)

    async def refresh(self) -> None:
        breaker = self.breaker
        trial = not breaker.attached
        if trial and not breaker.due():
            return
        try:
            await self._try()
        except StorageError as error:
            breaker.note(str(error))
            if not breaker.attached:
                breaker.detach(str(error))
            return
        if trial and not breaker.attached and not breaker.by_hand:
            breaker.attach()

    async def attach(self) -> None:
        breaker = self.breaker
        if breaker.attached:
            return
        breaker.by_hand = False  # from now on it is tried again by itself
        try:
            await self._try()
        except StorageError as error:
            breaker.detach(str(error))
            raise
        if breaker.by_hand:
            raise StorageError("it was detached again before it had answered")
        breaker.attach()

    def detach(self) -> None:
        self.breaker.detach("by hand")
        self.breaker.by_hand = True

    async def clear(self) -> None:
        await self.inner.clear()

    def stats(self) -> dict[str, float]:
        breaker = self.breaker
        return {
            **self.inner.stats(),
            **self.gets.stats(),
            **self.sets.stats(),
            "l3_attached": int(breaker.attached),
            "l3_failures": breaker.failures,
            "l3_detached": breaker.detached,
            "l3_refused": breaker.refused,
        }

    async def close(self) -> None:
        await self.inner.close()


class BreakerPages(ModelPages):
    """One model's pages: those of the store while it is attached, else none."""

    def __init__(
        self, opener: Callable[[], Awaitable[ModelPages]], breaker: Breaker, gets: Latency, sets: Latency
    ) -> None:
        """None are there until `open`."""
        self._opener = opener
        self._inner: ModelPages = NoPages()
        self._breaker = breaker
        self._gets = gets
        self._sets = sets
        self._none = NoPages()

    async def open(self) -> None:
        """Raises StoreLostError when the store is lost or too late, StorageError when it holds another model."""
        try:
            async with asyncio.timeout(self._breaker.limit_s):
                self._inner = await self._opener()
        except TimeoutError:
            raise StoreLostError(f"a model's pages aren't there after {self._breaker.limit_s} s") from None

    async def batch_exists(self, digests: Sequence[bytes]) -> int:
        return await self._breaker.guard(self._pages().batch_exists(digests), 0)

    async def batch_get(
        self, digests: Sequence[bytes], buffers: Sequence[memoryview], stop: threading.Event
    ) -> BatchRead:
        misses = BatchRead([None] * len(digests), 0, len(digests))
        pages = self._pages()
        read = self._timed(self._gets, pages, pages.batch_get(digests, buffers, stop))
        return await self._breaker.guard(read, misses, _why_failed)

    async def batch_set(
        self,
        digests: Sequence[bytes],
        buffers: Sequence[memoryview],
        checksums: Sequence[Checksums],
        stop: threading.Event,
    ) -> list[bool]:
        pages = self._pages()
        stored = self._timed(self._sets, pages, pages.batch_set(digests, buffers, checksums, stop))
        # Behind other writes to a slow disk it may be late, and nobody waits for it.
        return await self._breaker.guard(stored, [False] * len(digests), may_queue=True)

    async def remove(self, digests: Sequence[bytes]) -> int:
        return await self._breaker.guard(self._pages().remove(digests), 0)

    def holds(self, digest: bytes) -> bool:
        return self._inner.holds(digest)

    def take_dropped(self) -> list[bytes]:
        return self._inner.take_dropped()

    def _timed(self, latency: Latency, pages: ModelPages, work: Awaitable[T]) -> Awaitable[T]:
        return latency.of(work) if pages is self._inner else work

    def _pages(self) -> ModelPages:
        if self._breaker.attached:
            return self._inner
        self._breaker.refused += 1
        return self._none


def _why_failed(read: BatchRead) -> str:
    """A batch failed when pages couldn't be read and none was: one bad sector says nothing of the store."""
    if read.failed and all(each is None for each in read.checksums):
        return f"{read.failed} pages couldn't be read"
    return ""
