"""A simulated GPU worker: every command as `services.gpu_worker` carries it out, on pages of known content."""

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvtide.simulation.content import EMPTY, Slot, attend, checksum, next_token, walk
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
    Sampled,
    SegmentDropped,
    SegmentMapped,
    StepDone,
    StepFailed,
    StepItem,
    WorkerHello,
    WriteDone,
    WritePages,
)
from shared.op_log import OpLog, Seen
from shared.packed import pack, unpack

if TYPE_CHECKING:
    from kvtide.simulation.world import World

RANK = 0


class SimWorker(Process):
    """One rank."""

    def __init__(self, world: "World", identity: str) -> None:
        super().__init__(world, identity)
        plan = world.plan
        self._rng = random.Random(f"worker {self.key.epoch} {plan.seed}")
        self.page_size = plan.settings.page_size
        self.slots: list[Slot] = [EMPTY] * (plan.device_pages * self.page_size)
        self.table: dict[int, list[int]] = {}  # row -> pages
        self.broken: set[int] = set()  # rows whose last step failed
        self.length: dict[int, int] = {}  # row -> computed tokens
        self.last: dict[int, int] = {}  # row -> last sampled token
        self.mapped: dict[tuple[str, int], Segment] = {}
        self._log = OpLog()
        self._live: dict[Job, type] = {}
        self._barriers: list[tuple[int, int, set[Job], Callable[[], Message]]] = []
        self._compute, self._writes, self._loads = (Stream(self, self._ended) for _ in range(3))

    def hello(self) -> Message:
        """See WorkerHello."""
        plan = self.world.plan
        return WorkerHello(
            self.key.identity, RANK, self.world.geometry, self.world.model, plan.device_pages, plan.rows,
            plan.max_context, plan.max_steps, plan.credits,
        )  # fmt: skip

    def on_scheduler(self) -> None:
        """Another scheduler's operations are stopped."""
        if self.scheduler_epoch != getattr(self, "_epoch", 0):
            self._epoch = self.scheduler_epoch
            self._log.clear()
            self._stop(list(self._live))

    def kill(self) -> None:
        """The kernel unmaps what the process mapped."""
        super().kill()
        for segment in self.mapped.values():
            segment.holders.discard(self.key)
            segment.exited.add(self.key)

    def on_message(self, message: Any) -> None:
        """Carry out a command once."""
        if isinstance(message, Cancel):
            self._cancel(message.target)
            return
        match self._log.begin(message.op_id):
            case Seen.NEW:
                self._carry_out(message)
            case Seen.DONE:
                self.world.seen["answered_again"] += 1
                self._resend(message.op_id)
            case Seen.STALE:
                self.send(OperationFailed(message.op_id, RANK, "stale", -1, b""))
            case Seen.RUNNING:
                self.world.seen["asked_while_running"] += 1

    # --- commands -----------------------------------------------------------------------------------------------

    def _carry_out(self, message: Any) -> None:
        match message:
            case RunStep():
                self._start(self._step(message), self._compute, RunStep)
            case WritePages() | LoadPages():
                segment = self.mapped.get((message.storage_id, message.segment_epoch))
                if segment is None:
                    self._answer(message.op_id, OperationFailed(message.op_id, RANK, "segment", -1, b""))
                elif isinstance(message, WritePages):
                    self._start(self._write(message, segment), self._writes, WritePages)
                else:
                    self._start(self._load(message, segment), self._loads, LoadPages)
            case MapSegment():
                self._map(message)
            case DropSegment():
                segment = self.mapped.pop((message.storage_id, message.segment_epoch), None)
                users = {job for job, kind in self._live.items() if kind is not RunStep}
                self._answer_after(message.op_id, users, lambda: self._unmap(message.op_id, segment))
            case Fence():
                self._stop(list(self._live))
                self._answer_after(message.op_id, set(self._live), lambda: Fenced(message.op_id, RANK))

    def _map(self, message: MapSegment) -> None:
        info = message.segment
        segment = self.world.segments.get((info.storage_id, info.epoch))
        if segment is None:
            self._answer(message.op_id, OperationFailed(message.op_id, RANK, "segment", -1, b""))
            return
        segment.holders.add(self.key)
        self.mapped[info.storage_id, info.epoch] = segment
        self._answer(message.op_id, SegmentMapped(message.op_id, RANK))

    def _unmap(self, op_id: int, segment: Segment | None) -> Message:
        if segment is not None:
            segment.holders.discard(self.key)
        return SegmentDropped(op_id, RANK)

    def _cancel(self, target: int) -> None:
        match self._log.begin(target):
            case Seen.NEW:
                self._answer(target, Cancelled(target, RANK, b""))
            case Seen.DONE:
                self._resend(target)
            case Seen.STALE:
                self.send(OperationFailed(target, RANK, "stale", -1, b""))
            case Seen.RUNNING:
                self._stop([job for job in self._mine() if job.op_id == target and self._live[job] is not RunStep])

    # --- jobs ---------------------------------------------------------------------------------------------------

    def _step(self, message: RunStep) -> Job:
        plan, rng = self.world.plan, self._rng
        loads = [job for job in self._mine() if job.op_id in message.wait_for]
        settled = set(message.wait_for) - {job.op_id for job in loads}
        lost = sorted(op_id for op_id in settled if not isinstance(self._log.result(op_id), LoadDone))
        roots = self.world.step_roots[self._epoch, message.op_id]
        sampled: list[Sampled] = []
        failed: list[str] = []
        rows: list[bool] = []

        def begin() -> None:
            rows.extend(self._write_row(item) for item in message.items)
            if not all(rows):
                failed.append("error")
            elif lost or any(not job.ok for job in loads):
                failed.append("load")
            elif rng.random() < plan.fail_step and self.world.clock.now < plan.faults_end:
                failed.append("error")

        def compute() -> None:
            if failed:
                self.broken.update(item.row for item in message.items)
                if all(rows) and rng.random() < 0.5:  # slots may hold anything
                    self._spoil(message.items)
                return
            for item, start in zip(message.items, roots, strict=True):
                sampled.extend(self._forward(item, start))

        def answer() -> Message:
            if failed:
                job.ok = False
                bad = lost + [load.op_id for load in loads if not load.ok]
                return StepFailed(message.op_id, RANK, failed[0], bad)
            job.ok = True
            return StepDone(message.op_id, RANK, sampled, 0.0)

        first = rng.uniform(0.0, plan.step_s)
        parts = [(0.0, begin), (first, compute), (rng.uniform(0.0, plan.step_s), lambda: None)]
        job = Job(message.op_id, self._epoch, list(loads), parts, answer)
        job.pages = {page for item in message.items for page in self._pages_of(item)}  # type: ignore[attr-defined]
        return job

    def _pages_of(self, item: StepItem) -> list[int]:
        pages = self.table.get(item.row, [])[: item.first_page] + unpack(item.pages).tolist()
        count = len(item.tokens) // 4 or 1
        return pages[item.start // self.page_size : (item.start + count - 1) // self.page_size + 1]

    def _write_row(self, item: StepItem) -> bool:
        row = self.table.setdefault(item.row, [])
        given = unpack(item.pages).tolist()
        if not 1 <= item.row <= self.world.plan.rows:
            self.world.fail(f"there is no row {item.row}")
        if (item.first_page or not item.tokens) and self.length.get(item.row) != item.start:
            self._lost_step(item)
            return False
        row[item.first_page : item.first_page + len(given)] = given
        count = len(item.tokens) // 4 or 1
        needed = -(-(item.start + count) // self.page_size)
        bad = [page for page in row[:needed] if not 1 <= page < self.world.plan.device_pages]
        if len(row) < needed or bad:
            self.world.fail(f"row {item.row} has pages {row} for {item.start + count} tokens")
        return True

    def _lost_step(self, item: StepItem) -> None:
        lossy = self.world.plan.lose or self.world.seen["cut_worker"]
        if item.row not in self.broken and (not lossy or self.world.plan.max_steps == 1):
            self.world.fail(f"row {item.row} can't go on at page {item.first_page}, token {item.start}")
        self.world.seen["step_overtook"] += 1

    def _forward(self, item: StepItem, start: int) -> list[Sampled]:
        row = self.table[item.row]
        size = self.page_size
        after = attend(start, [self.slots[row[at // size] * size + at % size] for at in range(item.start)])
        tokens = unpack(item.tokens).tolist() or [self.last[item.row]]
        for at, slot in enumerate(walk(after, tokens), item.start):
            self.slots[row[at // size] * size + at % size] = slot
            after = slot.after
        self.broken.discard(item.row)
        self.length[item.row] = item.start + len(tokens)
        if item.sampling is None:
            return []
        token = self.last[item.row] = next_token(after)
        return [Sampled(item.row, token, -0.5, b"", b"")]

    def _spoil(self, items: list[StepItem]) -> None:
        for item in items:
            row = self.table[item.row]
            for at in range(item.start, min(item.start + (len(item.tokens) // 4 or 1), len(row) * self.page_size)):
                self.slots[row[at // self.page_size] * self.page_size + at % self.page_size] = EMPTY

    def _write(self, message: WritePages, segment: Segment) -> Job:
        device, host = unpack(message.device_pages).tolist(), unpack(message.host_pages).tolist()
        steps = [job for job, kind in self._live.items() if kind is RunStep]
        waits = [job for job in steps if job.pages & set(device)]  # type: ignore[attr-defined]
        sums: dict[int, bytes] = {}
        failed = self._fails()

        def copy(positions: range) -> None:
            for position in positions:
                page = device[position] * self.page_size
                content = tuple(self.slots[page : page + self.page_size])
                segment.content[host[position]] = content
                segment.writes += 1
                sums[position] = checksum([content])

        def answer() -> Message:
            if job.cancelled and len(sums) < len(host):
                return Cancelled(message.op_id, RANK, b"")
            if failed or any(not step.ok for step in waits):
                return OperationFailed(message.op_id, RANK, "error", -1, b"")
            job.ok = True
            return WriteDone(message.op_id, RANK, b"".join(sums[each] for each in range(len(host))), 0.0)

        job = Job(message.op_id, self._epoch, waits, self._copy_parts(len(host), copy), answer, stop_early=True)
        return job

    def _load(self, message: LoadPages, segment: Segment) -> Job:
        device, host = unpack(message.device_pages).tolist(), unpack(message.host_pages).tolist()
        digests = [message.digests[32 * each : 32 * each + 32] for each in range(len(host))]
        bad: dict[str, list[int]] = {"name": [], "checksum": []}
        done: set[int] = set()
        failed = self._fails()

        def copy(positions: range) -> None:
            for position in positions:
                name = segment.names.get(host[position])
                content = segment.content[host[position]]
                if name is None or name.digest != digests[position]:
                    bad["name"].append(position)
                elif name.checksums != checksum([content]):
                    bad["checksum"].append(position)
                page = device[position] * self.page_size
                self.slots[page : page + self.page_size] = content
                done.add(position)

        def answer() -> Message:
            if job.cancelled and len(done) < len(host):
                return Cancelled(message.op_id, RANK, b"")
            for reason, positions in bad.items():
                if positions:
                    if reason == "name":
                        self.world.fail(f"load {message.op_id} named host pages that have no or another name")
                    self.world.seen[f"load_bad_{reason}"] += 1
                    return OperationFailed(message.op_id, RANK, reason, 0, pack(positions))
            if failed:
                return OperationFailed(message.op_id, RANK, "error", -1, b"")
            job.ok = True
            return LoadDone(message.op_id, RANK, 0.0)

        job = Job(message.op_id, self._epoch, [], self._copy_parts(len(host), copy), answer, stop_early=True)
        return job

    def _copy_parts(self, pages: int, copy: Callable[[range], None]) -> list[tuple[float, Callable[[], None]]]:
        """The copy in two parts, somewhere inside its time."""
        middle = self._rng.randint(0, pages)
        first, second, third = (self._rng.uniform(0.0, self.world.plan.copy_s) / 3 for _ in range(3))
        return [
            (first, lambda: copy(range(middle))),
            (second, lambda: copy(range(middle, pages))),
            (third, lambda: None),
        ]

    def _fails(self) -> bool:
        plan = self.world.plan
        return self._rng.random() < plan.fail_copy and self.world.clock.now < plan.faults_end

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
                self._ended(job, Cancelled(job.op_id, RANK, b""))

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
