"""The worker at its scheduler's link: every command is carried out once, and answered.

All of it runs in the event loop. Copies and steps run on streams and come back through `call_soon_threadsafe`.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from services.gpu_worker.engine import Engine
from services.gpu_worker.operations import Load, Operation, Step, Write
from services.gpu_worker.remote_segment import RemoteSegment
from services.gpu_worker.segments import Segments
from services.gpu_worker.streams import Stream
from services.gpu_worker.totals import Totals
from services.gpu_worker.transfers import RANK
from shared.config import HostPath
from shared.errors import CapacityError, GeometryError, ProtocolError, SegmentError
from shared.link import SchedulerLink
from shared.messages import ToWorker
from shared.messages.common import Cancel, Cancelled, Fence, Fenced, Message, OperationFailed
from shared.messages.worker import (
    DropSegment,
    LoadDone,
    LoadPages,
    MapSegment,
    RunStep,
    SegmentDropped,
    SegmentMapped,
    StepFailed,
    WorkerHello,
    WritePages,
)
from shared.op_log import OpLog, Seen

MAX_STEPS = 2  # the next forward pass is here when one ends
CREDITS = 32  # copies in flight: enough to keep both streams full, few enough that a fence is quick

log = logging.getLogger("kvtide.worker")


@dataclass(eq=False)
class Barrier:
    """A command that is answered when the operations before it have ended."""

    op_id: int
    epoch: int
    waits_for: set[Operation]
    then: Callable[[], Message]  # makes the answer


class Worker:
    """Owner of the link: see `shared.link.LinkOwner`. Make it inside a running event loop."""

    def __init__(self, endpoint: str, identity: str, engine: Engine, host_path: HostPath = "auto") -> None:
        self.link = SchedulerLink(endpoint, identity, ToWorker, self)
        self._identity = identity
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._segments = Segments(
            engine.geometry, engine.fingerprint, identity, self.link.epoch, host_path, self.link.greet
        )
        self._totals = Totals(engine.geometry)
        self._log = OpLog()
        self._epoch = 0  # of the scheduler whose commands count
        self._live: set[Operation] = set()  # queued or running, of any scheduler
        self._barriers: list[Barrier] = []
        self._joining: set[asyncio.Task[None]] = set()
        self._closing = False

    # ---- the link's owner ----

    def hello(self) -> Message:
        engine = self._engine
        return WorkerHello(
            identity=self._identity,
            rank=RANK,
            geometry=engine.geometry,
            model_fingerprint=engine.fingerprint,
            device_pages=engine.pool.pages,
            max_requests=engine.max_requests,
            max_context=engine.max_context,
            max_steps=MAX_STEPS,
            credits=CREDITS,
            mapped=self._segments.usable(),
        )

    def stats(self) -> dict[str, float]:
        dropped = {f"dropped_{reason}": float(count) for reason, count in self.link.counters.items()}
        return {"device_bytes": float(self._engine.pool.nbytes), **self._totals.values, **dropped}

    def busy(self) -> bool:
        return bool(self._live)

    def on_scheduler(self, epoch: int) -> None:
        if epoch == self._epoch:
            return
        log.info("scheduler epoch=%d running=%d", epoch, len(self._live))
        self._epoch = epoch
        self._log.clear()
        self._stop(list(self._live))

    def on_lost(self) -> None:
        """What runs goes on; its answers wait in the log for a scheduler that asks again."""

    def on_message(self, message: Any) -> None:
        if self._closing:
            return
        if isinstance(message, Cancel):
            self._cancel(message.target)
            return
        match self._log.begin(message.op_id):
            case Seen.NEW:
                self._carry_out(message)
            case Seen.DONE:
                self._resend(message.op_id)
            case Seen.STALE:
                self.link.send(_failed(message.op_id, "stale"))
            case Seen.RUNNING:
                pass

    async def close(self) -> None:
        """Cancel and answer what runs, stop the streams, unmap the segments unless a stuck copy still uses them."""
        self._closing = True
        self._stop(list(self._live))
        if await asyncio.to_thread(self._engine.close):
            self._segments.close()

    # ---- commands ----

    def _carry_out(self, message: Any) -> None:
        try:
            match message:
                case RunStep():
                    self._run_step(message)
                case WritePages():
                    segment = self._segments.find(message.storage_id, message.segment_epoch)
                    write = Write(message, self._epoch, segment, self._engine.pool.pages, self._steps())
                    self._start(write, self._engine.writes, lambda: self._engine.transfers.write(write))
                case LoadPages():
                    segment = self._segments.find(message.storage_id, message.segment_epoch)
                    events = [self._engine.loads.event() for _ in range(self._engine.geometry.layers)]
                    load = Load(message, self._epoch, segment, self._engine.pool.pages, events)
                    self._start(load, self._engine.loads, lambda: self._engine.transfers.load(load))
                case MapSegment():
                    self._map_segment(message)
                case DropSegment():
                    self._drop_segment(message)
                case Fence():
                    self._fence(message.op_id)
                case _:
                    raise ProtocolError(f"a worker doesn't take {type(message).__name__}")
        except (SegmentError, GeometryError) as error:
            self._refuse(message, "segment", error)
        except CapacityError as error:
            self._refuse(message, "full", error)
        except ProtocolError as error:
            self._refuse(message, "error", error)

    def _run_step(self, command: RunStep) -> None:
        if command.after and self._misses(command.after):
            self._answer(command.op_id, StepFailed(command.op_id, RANK, "order", []))
            return
        running = [load for load in self._mine() if isinstance(load, Load) and load.op_id in command.wait_for]
        settled = set(command.wait_for) - {load.op_id for load in running}
        lost = sorted(op_id for op_id in settled if not isinstance(self._log.result(op_id), LoadDone))
        compute = self._engine.compute
        step = Step(command, self._epoch, running, lost, compute.event(), compute.event())
        self._start(step, compute, lambda: self._engine.stepper.run(step))

    def _misses(self, step: int) -> bool:
        """Was the step never seen, or has it failed? Then rows may have other pages and fewer tokens than the step
        that builds on it thinks."""
        return not self._log.knows(step) or isinstance(self._log.result(step), StepFailed | OperationFailed | Cancelled)

    def _map_segment(self, command: MapSegment) -> None:
        segment = self._segments.map(command.segment)
        if isinstance(segment, RemoteSegment):
            joining = asyncio.create_task(self._join(command, segment, self._epoch))
            self._joining.add(joining)  # the loop itself keeps only a weak reference
            joining.add_done_callback(self._joining.discard)
        else:
            self._answer(command.op_id, SegmentMapped(command.op_id, RANK))

    async def _join(self, command: MapSegment, segment: RemoteSegment, epoch: int) -> None:
        try:
            answer: Message = SegmentMapped(command.op_id, RANK, await segment.join())
        except SegmentError as error:
            log.warning("not_joined op_id=%d error=%s", command.op_id, error)
            answer = _failed(command.op_id, "segment")
        if epoch == self._epoch:
            self._answer(command.op_id, answer)

    def _drop_segment(self, command: DropSegment) -> None:
        segment = self._segments.take(command.storage_id, command.segment_epoch)
        users: set[Operation] = {op for op in self._live if isinstance(op, Load | Write) and op.segment is segment}

        def unmap() -> Message:
            if segment is not None:
                segment.close()
            return SegmentDropped(command.op_id, RANK)

        self._answer_after(Barrier(command.op_id, self._epoch, users, unmap))

    def _fence(self, op_id: int) -> None:
        self._stop(list(self._live))
        self._log.fence(op_id)
        self._answer_after(Barrier(op_id, self._epoch, set(self._live), lambda: Fenced(op_id, RANK)))

    def _cancel(self, target: int) -> None:
        """A Cancel isn't logged: it is answered by its target, and doing it twice does no harm."""
        match self._log.begin(target):
            case Seen.NEW:  # the target is overtaken or lost: it must not begin when it comes
                self._answer(target, Cancelled(target, RANK, b""))
            case Seen.DONE:
                self._resend(target)
            case Seen.STALE:
                self.link.send(_failed(target, "stale"))
            case Seen.RUNNING:
                self._stop([op for op in self._mine() if op.op_id == target and not isinstance(op, Step)])

    def _refuse(self, message: Any, reason: str, error: Exception) -> None:
        log.warning("refused command=%s op_id=%d error=%s", type(message).__name__, message.op_id, error)
        if isinstance(message, RunStep):
            self._answer(message.op_id, StepFailed(message.op_id, RANK, "error", []))
        else:
            self._answer(message.op_id, _failed(message.op_id, reason))

    # ---- operations on streams ----

    def _start(self, operation: Operation, stream: Stream, work: Callable[[], Message]) -> None:
        def run() -> None:
            if operation.begin():
                answer = work()
                self._loop.call_soon_threadsafe(self._ended, operation, answer)

        stream.submit(run)
        self._live.add(operation)
        self.link.quicken()

    def _stop(self, operations: list[Operation]) -> None:
        """Drop what has not begun; what runs ends by itself, copies at their next batch."""
        for operation in operations:
            if operation.cancel():
                self._ended(operation, Cancelled(operation.op_id, RANK, b""))

    def _ended(self, operation: Operation, answer: Message) -> None:
        self._live.discard(operation)
        self._totals.add(operation, answer)
        if operation.epoch == self._epoch:
            self._answer(operation.op_id, answer)
        for barrier in self._barriers:
            barrier.waits_for.discard(operation)
        self._open_barriers()

    def _answer_after(self, barrier: Barrier) -> None:
        self._barriers.append(barrier)
        self._open_barriers()

    def _open_barriers(self) -> None:
        opened = [barrier for barrier in self._barriers if not barrier.waits_for]
        self._barriers = [barrier for barrier in self._barriers if barrier.waits_for]
        for barrier in opened:
            answer = barrier.then()
            if barrier.epoch == self._epoch:
                self._answer(barrier.op_id, answer)

    def _mine(self) -> list[Operation]:
        """Live operations of the present scheduler."""
        return [operation for operation in self._live if operation.epoch == self._epoch]

    def _steps(self) -> list[Step]:
        return [operation for operation in self._live if isinstance(operation, Step)]

    def _answer(self, op_id: int, answer: Message) -> None:
        self._log.finish(op_id, answer)
        self.link.send(answer)

    def _resend(self, op_id: int) -> None:
        answer = self._log.result(op_id)
        assert answer is not None, f"operation {op_id} is done and has no answer"
        self.link.send(answer)


def _failed(op_id: int, reason: str) -> OperationFailed:
    return OperationFailed(op_id, RANK, reason, -1, b"")
