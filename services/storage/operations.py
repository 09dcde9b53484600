"""Operations in flight: each is done once, can be cancelled, and is fenced.

An operation that touches pages has a `stop` event, which its I/O threads read: once it is set they begin no page.
Nothing else ends an operation, so that an answer always means: no thread touches its pages any more.
"""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable

from shared.errors import KvtideError
from shared.messages.common import Cancelled, Fenced, Message, OperationFailed
from shared.op_log import OpLog, Seen
from shared.packed import pack

RANK = 0  # a storage has no TP rank

log = logging.getLogger("kvtide.storage")


class RefusedError(KvtideError):
    """A command that can't be carried out; `reason` is OperationFailed's."""

    def __init__(self, reason: str, detail: str, positions: list[int] | None = None) -> None:
        super().__init__(detail)
        self.reason = reason
        self.positions = positions or []


class Operation:
    """One operation that touches pages."""

    def __init__(self, scheduler_epoch: int, op_id: int) -> None:
        self.scheduler_epoch = scheduler_epoch
        self.op_id = op_id
        self.stop = threading.Event()
        self.ended = asyncio.Event()
        self.named: list[int] = []  # positions in its page list that are filled and named


class Operations:
    """The operations of the current scheduler, and what is left of an earlier one's."""

    def __init__(self, send: Callable[[Message], object]) -> None:
        self._send = send
        self._log = OpLog()
        self._scheduler_epoch = 0
        self._running: set[Operation] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._openings: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def new_scheduler(self, epoch: int) -> None:
        """Another scheduler leads: stop everything that an earlier one asked for. A Fence still waits for it."""
        if epoch != self._scheduler_epoch:
            self._scheduler_epoch = epoch
            self._log.clear()
            self._stop(lambda operation: True)

    def begin(self, op_id: int) -> bool:
        """Register a command; True if it is to be carried out. A repeated one gets its answer again."""
        seen = self._log.begin(op_id)
        if seen is Seen.DONE:
            answer = self._log.result(op_id)
            assert answer is not None
            self._send(answer)
        elif seen is Seen.STALE:
            self._send(OperationFailed(op_id, RANK, "stale", -1, b""))
        return seen is Seen.NEW

    def do(self, op_id: int, work: Callable[[], Message]) -> None:
        """Carry a command out at once and answer it."""
        try:
            answer = work()
        except Exception as error:  # whatever it is, its sender must hear that nothing touches the pages
            answer = _failure(op_id, error)
        self._answer(self._scheduler_epoch, op_id, answer)

    def start(self, op_id: int, work: Callable[[], Awaitable[Message]]) -> None:
        """Carry a command out in a task of its own and answer it. It touches no pages."""
        self._spawn(self._run(self._scheduler_epoch, op_id, work))

    def start_opening(self, op_id: int, work: Callable[[], Awaitable[Message]]) -> None:
        """The same for one that changes which segment there is: a later Fence waits for it, too."""
        opening = asyncio.ensure_future(self._run(self._scheduler_epoch, op_id, work))
        self._openings.add(opening)
        opening.add_done_callback(self._openings.discard)
        self._spawn(opening)

    def start_transfer(self, op_id: int, work: Callable[[Operation], Awaitable[Message]]) -> None:
        """The same for one that touches pages; it answers Cancelled if it was stopped before its end."""
        operation = Operation(self._scheduler_epoch, op_id)
        self._running.add(operation)
        self._spawn(self._transfer(operation, work))

    def progress(self, operation: Operation, message: Message) -> None:
        """Tell how far a transfer is, if the scheduler that asked for it still leads."""
        if operation.scheduler_epoch == self._scheduler_epoch:
            self._send(message)

    def cancel(self, op_id: int) -> None:
        """Stop a running transfer. A target that isn't known (lost, or overtaken by this) is answered Cancelled, one
        that has been answered is answered again; any other command ends by itself.
        """
        if self.begin(op_id):
            self._answer(self._scheduler_epoch, op_id, Cancelled(op_id, RANK, b""))
        else:
            self._stop(lambda each: each.op_id == op_id and each.scheduler_epoch == self._scheduler_epoch)

    def fence(self, op_id: int) -> None:
        """Stop every transfer from before this command, and answer it once none touches a page and no segment is
        being opened."""
        epoch = self._scheduler_epoch
        self._log.fence(op_id)

        openings = set(self._openings)

        async def work() -> Message:
            if openings:
                await asyncio.wait(openings)
            await self.quiesce(lambda each: each.scheduler_epoch != epoch or each.op_id < op_id)
            return Fenced(op_id, RANK)

        self.start(op_id, work)

    async def quiesce(self, which: Callable[[Operation], bool] = lambda operation: True) -> None:
        """Stop transfers and wait until they touch no page."""
        for operation in self._stop(which):
            await operation.ended.wait()

    def _stop(self, which: Callable[[Operation], bool]) -> list[Operation]:
        stopped = [operation for operation in self._running if which(operation)]
        for operation in stopped:
            operation.stop.set()
        return stopped

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)  # the loop itself keeps only a weak reference
        task.add_done_callback(self._tasks.discard)

    async def _run(self, scheduler_epoch: int, op_id: int, work: Callable[[], Awaitable[Message]]) -> None:
        try:
            answer = await work()
        except Exception as error:
            answer = _failure(op_id, error)
        self._answer(scheduler_epoch, op_id, answer)

    async def _transfer(self, operation: Operation, work: Callable[[Operation], Awaitable[Message]]) -> None:
        op_id = operation.op_id
        try:
            answer = await work(operation)
            if operation.stop.is_set():
                answer = Cancelled(op_id, RANK, pack(operation.named))
        except Exception as error:
            answer = _failure(op_id, error)
        finally:
            self._running.discard(operation)
            operation.ended.set()
        self._answer(operation.scheduler_epoch, op_id, answer)

    def _answer(self, scheduler_epoch: int, op_id: int, answer: Message) -> None:
        if scheduler_epoch == self._scheduler_epoch:
            self._log.finish(op_id, answer)
            self._send(answer)


def _failure(op_id: int, error: Exception) -> OperationFailed:
    if isinstance(error, RefusedError):
        log.warning("operation_refused op_id=%d reason=%s detail=%s", op_id, error.reason, error)
        return OperationFailed(op_id, RANK, error.reason, -1, pack(error.positions))
    log.error("operation_failed op_id=%d", op_id, exc_info=error)
    return OperationFailed(op_id, RANK, "error", -1, b"")
