"""A simulated GPU worker: every command as `services.gpu_worker` carries it out, on pages of known content."""

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvtide.simulation.device import Device
from kvtide.simulation.jobs import load_job, step_job, write_job
from kvtide.simulation.process import Process
from kvtide.simulation.segment import Segment
from kvtide.simulation.streams import Job, Stream
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

if TYPE_CHECKING:
    from kvtide.simulation.world import World


class SimWorker(Process):
    """One rank."""

    def __init__(self, world: "World", rank: int) -> None:
        super().__init__(world, f"worker-{rank}")
        self.rank = rank
        plan = world.plan
        self.rng = random.Random(f"worker {self.key.epoch} {plan.seed}")
        self.device = Device(world, rank)
        self.mapped: dict[tuple[str, int], Segment] = {}
        self._log = OpLog()
        self._fenced = 0  # op_id of the last Fence: what is older is stale
        self._epoch = 0  # of the scheduler whose commands count
        self._live: dict[Job, type] = {}
        self._barriers: list[tuple[int, int, set[Job], Callable[[], Message]]] = []
        self._compute, self._writes, self._loads = (Stream(self, self._ended) for _ in range(3))

    def hello(self) -> Message:
        """See WorkerHello."""
        plan = self.world.plan
        return WorkerHello(
            self.key.identity, self.rank, self.world.geometries[self.rank], self.world.model, plan.device_pages,
            plan.rows, plan.max_context, plan.max_steps, plan.credits, [epoch for _, epoch in self.mapped],
        )  # fmt: skip

    def on_scheduler(self) -> None:
        """Another scheduler's operations are stopped."""
        if self.scheduler_epoch != self._epoch:
            self._epoch = self.scheduler_epoch
            self._log.clear()
            self._fenced = 0
            self._stop(list(self._live))

    def kill(self) -> None:
        """The kernel unmaps what the process mapped."""
        super().kill()
        for segment in self.world.segments.values():
            if self.key in segment.holders:  # told to drop it or not
                segment.holders.discard(self.key)
                segment.exited.add(self.key)

    def on_message(self, message: Any) -> None:
        """Carry out a command once."""
        if isinstance(message, Cancel):
            self._cancel(message.target)
            return
        seen = self._log.begin(message.op_id)
        if seen is Seen.NEW and message.op_id < self._fenced:  # it was overtaken by a Fence
            self._answer(message.op_id, OperationFailed(message.op_id, self.rank, "stale", -1, b""))
            return
        match seen:
            case Seen.NEW:
                self._carry_out(message)
            case Seen.DONE:
                self.world.seen["answered_again"] += 1
                self._resend(message.op_id)
            case Seen.STALE:
                self.send(OperationFailed(message.op_id, self.rank, "stale", -1, b""))
            case Seen.RUNNING:
                self.world.seen["asked_while_running"] += 1

    # --- commands -----------------------------------------------------------------------------------------------

    def _carry_out(self, message: Any) -> None:
        match message:
            case RunStep() if message.after and self._misses(message.after):
                self._answer(message.op_id, StepFailed(message.op_id, self.rank, "order", []))
            case RunStep():
                self._start(self._step(message), self._compute, RunStep)
            case WritePages() | LoadPages():
                segment = self.mapped.get((message.storage_id, message.segment_epoch))
                if segment is None:
                    self._answer(message.op_id, OperationFailed(message.op_id, self.rank, "segment", -1, b""))
                elif isinstance(message, WritePages):
                    steps = [job for job, kind in self._live.items() if kind is RunStep]
                    self._start(write_job(self, self._epoch, message, segment, steps), self._writes, WritePages)
                else:
                    self._start(load_job(self, self._epoch, message, segment), self._loads, LoadPages)
            case MapSegment():
                self._map(message)
            case DropSegment():
                segment = self.mapped.pop((message.storage_id, message.segment_epoch), None)
                users = {job for job, kind in self._live.items() if kind is not RunStep}
                self._answer_after(message.op_id, users, lambda: self._unmap(message.op_id, segment))
            case Fence():
                self._fenced = max(self._fenced, message.op_id)
                self._stop(list(self._live))
                self._answer_after(message.op_id, set(self._live), lambda: Fenced(message.op_id, self.rank))

    def _misses(self, step: int) -> bool:
        return not self._log.knows(step) or isinstance(self._log.result(step), StepFailed | OperationFailed | Cancelled)

    def _map(self, message: MapSegment) -> None:
        info = message.segment
        segment = self.world.segments.get((info.storage_id, info.epoch))
        if segment is None:
            self._answer(message.op_id, OperationFailed(message.op_id, self.rank, "segment", -1, b""))
            return
        segment.holders.add(self.key)
        self.mapped[info.storage_id, info.epoch] = segment
        self._answer(message.op_id, SegmentMapped(message.op_id, self.rank))

    def _unmap(self, op_id: int, segment: Segment | None) -> Message:
        if segment is not None:
            segment.holders.discard(self.key)
        return SegmentDropped(op_id, self.rank)

    def _cancel(self, target: int) -> None:
        match self._log.begin(target):
            case Seen.NEW:
                self._answer(target, Cancelled(target, self.rank, b""))
            case Seen.DONE:
                self._resend(target)
            case Seen.STALE:
                self.send(OperationFailed(target, self.rank, "stale", -1, b""))
            case Seen.RUNNING:
                self._stop([job for job in self._mine() if job.op_id == target and self._live[job] is not RunStep])

    def _step(self, message: RunStep) -> Job:
        if not message.wait_for:
            return step_job(self, self._epoch, message, [], [])
        loads = [job for job in self._mine() if job.op_id in message.wait_for]
        settled = set(message.wait_for) - {job.op_id for job in loads}
        lost = sorted(op_id for op_id in settled if not isinstance(self._log.result(op_id), LoadDone))
        return step_job(self, self._epoch, message, loads, lost)

    # --- as `services.gpu_worker.worker` ------------------------------------------------------------------------

    def _start(self, job: Job, stream: Stream, kind: type) -> None:
        self._live[job] = kind
        stream.submit(job)

    def _mine(self) -> list[Job]:
        return [job for job in self._live if job.epoch == self._epoch]

    def _stop(self, jobs: list[Job]) -> None:
        for job in jobs:
            job.cancelled = True
            if not job.begun:
                self._ended(job, Cancelled(job.op_id, self.rank, b""))

    def _ended(self, job: Job, answer: Message) -> None:
        self._live.pop(job, None)
        job.ended = True
        if job.epoch == self._epoch:
            self._answer(job.op_id, answer)
        for action in job.then:
            action()
        job.then.clear()
        self._open_barriers()

    def _answer_after(self, op_id: int, jobs: set[Job], then: Callable[[], Message]) -> None:
        self._barriers.append((op_id, self._epoch, jobs, then))
        self._open_barriers()

    def _open_barriers(self) -> None:
        if not self._barriers:
            return
        ready = [barrier for barrier in self._barriers if all(job.ended for job in barrier[2])]
        self._barriers = [barrier for barrier in self._barriers if barrier not in ready]
        for op_id, epoch, _, then in ready:
            answer = then()
            if epoch == self._epoch:
                self._answer(op_id, answer)

    def _answer(self, op_id: int, answer: Message) -> None:
        self._log.finish(op_id, answer)
        self.send(answer)

    def _resend(self, op_id: int) -> None:
        answer = self._log.result(op_id)
        assert answer is not None
        self.send(answer)
