"""What a simulated worker does on its streams: steps, writes, loads. Pages move somewhere inside a job's time."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvtide.simulation.checks import check_device_use, check_host_use
from kvtide.simulation.clock import Action
from kvtide.simulation.content import checksum
from kvtide.simulation.segment import Segment
from kvtide.simulation.streams import Job
from shared.messages.common import Cancelled, Message, OperationFailed
from shared.messages.worker import LoadDone, LoadPages, RunStep, Sampled, StepDone, StepFailed, WriteDone, WritePages
from shared.packed import pack, unpack_list
from shared.page_hash import DIGEST_BYTES

if TYPE_CHECKING:
    from kvtide.simulation.worker import SimWorker


def step_job(worker: "SimWorker", epoch: int, message: RunStep, loads: list[Job], lost: list[int]) -> Job:
    """A forward pass behind `loads`; `lost` are loads that have failed or were never seen."""
    world, rng, device = worker.world, worker.rng, worker.device
    roots = [world.roots[item.request_id] for item in message.items]
    sampled: list[Sampled] = []
    reason = ""
    spoil = False

    def begin() -> None:
        nonlocal reason, spoil
        rows = [device.write_row(item) for item in message.items]
        if not all(rows):
            reason = "error"
        elif lost or any(not load.ok for load in loads):
            reason = "load"
        elif _fails(worker, world.plan.fail_step):
            world.seen["rank_failed_alone"] += world.ranks > 1
            reason, spoil = "error", rng.random() < 0.5

    def compute() -> None:
        check_device_use(worker, [page for item in message.items for page in device.pages_of(item)])
        for item, root in zip(message.items, roots, strict=True):
            if reason:
                device.fail(item, spoil=spoil)
            else:
                sampled.extend(device.forward(item, root))

    def answer() -> Message:
        if reason:
            return StepFailed(message.op_id, worker.rank, reason, lost + [load.op_id for load in loads if not load.ok])
        job.ok = True
        return StepDone(message.op_id, worker.rank, sampled, job.seconds)

    job = Job(message.op_id, epoch, list(loads), [(0.0, begin), (world.plan.step_s * rng.random(), compute)], answer)
    job.pages = {page for item in message.items for page in device.touched(item)}
    return job


def write_job(worker: "SimWorker", epoch: int, message: WritePages, segment: Segment, steps: list[Job]) -> Job:
    """Device pages into host pages, behind the steps that fill them."""
    device, host = unpack_list(message.device_pages), unpack_list(message.host_pages)
    waits = [step for step in steps if step.pages & set(device)]
    sums: dict[int, bytes] = {}
    failed = _fails(worker, worker.world.plan.fail_copy)

    def copy(positions: range) -> None:
        worker.world.seen["copied_after_cancel"] += job.cancelled
        check_device_use(worker, device[positions.start : positions.stop])
        check_host_use(worker.world, segment, host[positions.start : positions.stop])
        for position in positions:
            content = worker.device.read(device[position])
            segment.content[worker.rank][host[position]] = content
            sums[position] = checksum([content])

    def answer() -> Message:
        if job.cancelled and len(sums) < len(host):
            return Cancelled(message.op_id, worker.rank, b"")
        if failed or any(not step.ok for step in waits):
            return OperationFailed(message.op_id, worker.rank, "error", -1, b"")
        job.ok = True
        return WriteDone(message.op_id, worker.rank, b"".join(sums[each] for each in range(len(host))), 0.0)

    job = Job(message.op_id, epoch, waits, _copy_parts(worker, len(host), copy), answer, stop_early=True)
    return job


def load_job(worker: "SimWorker", epoch: int, message: LoadPages, segment: Segment) -> Job:
    """Host pages into device pages; names and checksums are compared."""
    device, host = unpack_list(message.device_pages), unpack_list(message.host_pages)
    bad: dict[str, list[int]] = {"name": [], "checksum": []}
    done: set[int] = set()
    failed = _fails(worker, worker.world.plan.fail_copy)

    def copy(positions: range) -> None:
        worker.world.seen["copied_after_cancel"] += job.cancelled
        check_device_use(worker, device[positions.start : positions.stop])
        check_host_use(worker.world, segment, host[positions.start : positions.stop])
        for position in positions:
            name, content = segment.names.get(host[position]), segment.content[worker.rank][host[position]]
            if name is None or name.digest != message.digests[position * DIGEST_BYTES :][:DIGEST_BYTES]:
                bad["name"].append(position)
            elif name.checksums[4 * worker.rank :][:4] != checksum([content]):
                bad["checksum"].append(position)
            worker.device.fill(device[position], content)
            done.add(position)

    def answer() -> Message:
        if job.cancelled and len(done) < len(host):
            return Cancelled(message.op_id, worker.rank, b"")
        if bad["name"]:
            worker.world.fail(f"load {message.op_id} named host pages that have no or another name")
        if bad["checksum"]:
            return OperationFailed(message.op_id, worker.rank, "checksum", 0, pack(bad["checksum"]))
        if failed:
            return OperationFailed(message.op_id, worker.rank, "error", -1, b"")
        job.ok = True
        return LoadDone(message.op_id, worker.rank, job.seconds)

    job = Job(message.op_id, epoch, [], _copy_parts(worker, len(host), copy), answer, stop_early=True)
    return job


def _copy_parts(worker: "SimWorker", pages: int, copy: Callable[[range], None]) -> list[tuple[float, Action]]:
    middle = worker.rng.randint(0, pages)
    first, second, third = [worker.world.plan.copy_s * worker.rng.random() / 3 for _ in range(3)]
    second += worker.world.stall_s
    return [
        (first, lambda: copy(range(middle))),
        (second, lambda: copy(range(middle, pages))),
        (third, _nothing),
    ]


def _fails(worker: "SimWorker", share: float) -> bool:
    return worker.rng.random() < share and worker.world.clock.now < worker.world.plan.faults_end


def _nothing() -> None:
    pass
