"""The worker at its link: hello, epochs, repeated commands, fences, segments, start and stop."""

import asyncio
import time
from pathlib import Path

import msgspec
import pytest

from services.gpu_worker import engine, service, transfers
from services.gpu_worker.engine import build_engine
from services.gpu_worker.worker import CREDITS
from shared import link, test_hooks
from shared.config import Config, load_config
from shared.errors import CapacityError, ModelError, ProtocolError
from shared.geometry import PageGeometry, Part
from shared.link import new_epoch
from shared.messages.common import Cancelled, Fence, Fenced, Heartbeat, OperationFailed, Refused, Welcome
from shared.messages.storage import SegmentInfo
from shared.messages.worker import DropSegment, MapSegment, RunStep, SegmentDropped, SegmentMapped, StepDone, WriteDone
from shared.op_log import KEPT_RESULTS
from shared.segments import create_segment
from tests.unit.gpu_worker.service.fake_scheduler import PAGE, WAIT_S, FakeScheduler, Stack, item


def test_hello_describes_the_pools(stack: Stack) -> None:
    hello = stack.hello
    assert (hello.identity, hello.rank, hello.max_steps, hello.credits) == ("worker", 0, 2, CREDITS)
    assert hello.geometry == PageGeometry(PAGE, 3, (Part("k", 2, 8, "float32"), Part("v", 2, 8, "float32")))
    assert (hello.device_pages, hello.max_requests, hello.max_context) == (256 // PAGE + 1, 4, 256)
    assert len(hello.model_fingerprint) == 32


async def test_a_repeated_command_is_answered_from_the_log(stack: Stack) -> None:
    scheduler, write = stack.scheduler, stack.write([1], [5])
    stack.fill([1])
    first = await scheduler.ask(write)
    stack.fill([1], seed=2)
    assert await scheduler.ask(write) == first


async def test_an_op_id_older_than_the_log_is_stale(stack: Stack) -> None:
    scheduler = stack.scheduler
    old = MapSegment(scheduler.op(), stack.info)
    assert isinstance(await scheduler.ask(old), SegmentMapped)
    later = [MapSegment(scheduler.op(), stack.info) for _ in range(KEPT_RESULTS)]
    for each in later:
        scheduler.tell(each)
    for each in later:
        assert isinstance(await scheduler.answer(each.op_id), SegmentMapped)
    assert await scheduler.ask(old) == OperationFailed(old.op_id, 0, "stale", -1, b"")


async def test_a_repeated_command_that_still_runs_is_ignored(stack: Stack, hooks: Path) -> None:
    test_hooks.arm(hooks, "worker_write", "sleep 0.3")
    scheduler, write = stack.scheduler, stack.write([1], [5])
    scheduler.tell(write)
    assert isinstance(await scheduler.ask(write), WriteDone)
    assert await scheduler.silence(write.op_id)


async def test_messages_of_another_epoch_are_dropped_and_counted(stack: Stack) -> None:
    scheduler, write = stack.scheduler, stack.write([1], [5])
    scheduler.tell(write, sender=scheduler.epoch - 1)
    assert await scheduler.silence(write.op_id)
    scheduler.tell(write, receiver=scheduler.peer_epoch - 1)
    assert await scheduler.silence(write.op_id)
    assert isinstance(await scheduler.ask(write), WriteDone)
    scheduler.heartbeats.clear()
    await scheduler.receive(lambda _: bool(scheduler.heartbeats))
    assert scheduler.heartbeats[-1].stats["dropped_old_epoch"] == 2


async def test_a_fence_waits_for_a_slow_copy_and_drops_what_waits(
    stack: Stack, hooks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "BATCH_BYTES", 1)  # a page in each copy call
    test_hooks.arm(hooks, "worker_write", "sleep 0.5")
    scheduler, running, waiting = stack.scheduler, stack.write([1, 2], [5, 6]), stack.write([3], [7])
    scheduler.tell(running)
    await _consumed(hooks / "worker_write")
    scheduler.tell(waiting)
    fence = Fence(scheduler.op())
    scheduler.tell(fence)
    answers = [await scheduler.receive(lambda message: not isinstance(message, Heartbeat)) for _ in range(3)]
    assert answers == [
        Cancelled(waiting.op_id, 0, b""),  # it had not begun
        Cancelled(running.op_id, 0, b""),  # sent when its copy has stopped
        Fenced(fence.op_id, 0),
    ]
    assert await scheduler.ask(fence) == Fenced(fence.op_id, 0)
    assert isinstance(await scheduler.ask(stack.write([1], [5])), WriteDone)


async def test_a_fence_lets_the_running_step_end(stack: Stack, hooks: Path) -> None:
    test_hooks.arm(hooks, "worker_step", "sleep 0.3")
    scheduler = stack.scheduler
    step = RunStep(scheduler.op(), [item(0, [1, 2, 3], [1])], [])
    scheduler.tell(step)
    await _consumed(hooks / "worker_step")
    fence = Fence(scheduler.op())
    assert await scheduler.ask(fence) == Fenced(fence.op_id, 0)
    assert isinstance(await scheduler.answer(step.op_id), StepDone)


async def test_a_new_schedulers_fence_waits_for_the_old_ones_copy(stack: Stack, hooks: Path) -> None:
    test_hooks.arm(hooks, "worker_write", "sleep 1")
    scheduler, running, waiting = stack.scheduler, stack.write([1], [5]), stack.write([2], [6])
    scheduler.tell(running)
    scheduler.tell(waiting)
    await _consumed(hooks / "worker_write")
    started = time.monotonic()
    scheduler.restart()
    await scheduler.welcome()
    fence = Fence(scheduler.op())
    assert await scheduler.ask(fence) == Fenced(fence.op_id, 0)
    assert time.monotonic() - started > 0.3
    assert await scheduler.silence(running.op_id)
    assert not stack.segment.pages_array[6].any()
    repeated = stack.write([1], [5])  # an op_id that the old scheduler used
    assert isinstance(await scheduler.ask(repeated), WriteDone)


async def test_a_new_scheduler_voids_what_waits_even_before_it_fences(stack: Stack, hooks: Path) -> None:
    test_hooks.arm(hooks, "worker_write", "sleep 0.3")
    scheduler, running, waiting = stack.scheduler, stack.write([1], [5]), stack.write([2], [6])
    stack.fill([1, 2])
    scheduler.tell(running)
    scheduler.tell(waiting)
    await _consumed(hooks / "worker_write")
    scheduler.restart()
    await scheduler.welcome()
    assert await scheduler.silence(waiting.op_id, timeout_s=0.6)
    assert stack.engine.writes.query()
    assert not stack.segment.pages_array[6].any()


async def test_a_copy_survives_a_silence_of_its_scheduler(
    stack: Stack, hooks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "BUSY_INTERVAL_S", 0.05)
    test_hooks.arm(hooks, "worker_write", "sleep 0.6")
    scheduler, write = stack.scheduler, stack.write([1], [5])
    scheduler.tell(write)
    await _consumed(hooks / "worker_write")
    scheduler.tell(Heartbeat(0.02, {}))  # lost after three of these
    await scheduler.welcome()
    assert isinstance(await scheduler.answer(write.op_id), WriteDone)


async def test_the_worker_is_heard_while_it_computes(stack: Stack, hooks: Path) -> None:
    test_hooks.arm(hooks, "worker_step", "sleep 2.5")
    scheduler = stack.scheduler
    step = RunStep(scheduler.op(), [item(0, [1, 2, 3], [1])], [])
    scheduler.heartbeats.clear()
    await scheduler.ask(step)
    assert len([beat for beat in scheduler.heartbeats if beat.interval_s == 1.0]) >= 2


async def test_segments_are_mapped_once_and_dropped_after_their_copies(stack: Stack, hooks: Path) -> None:
    scheduler, info = stack.scheduler, stack.info
    assert isinstance(await scheduler.ask(MapSegment(scheduler.op(), info)), SegmentMapped)
    [holder] = stack.holders()
    assert (holder.identity, holder.epoch, holder.segment_epoch) == ("worker", scheduler.peer_epoch, info.epoch)

    test_hooks.arm(hooks, "worker_write", "sleep 0.3")
    write = stack.write([1], [5])
    drop = DropSegment(scheduler.op(), info.storage_id, info.epoch)
    scheduler.tell(write)
    scheduler.tell(drop)
    late = stack.write([1], [6])
    failed = await scheduler.ask(late)
    assert failed == OperationFailed(late.op_id, 0, "segment", -1, b"")
    assert stack.holders() == [holder]
    assert await scheduler.answer(drop.op_id) == SegmentDropped(drop.op_id, 0)
    assert isinstance(await scheduler.answer(write.op_id), WriteDone)
    async with asyncio.timeout(WAIT_S):
        while stack.holders():  # noqa: ASYNC110 - on the remote path the worker's last message is on its way
            await asyncio.sleep(0.01)
    again = DropSegment(scheduler.op(), info.storage_id, info.epoch)
    assert await scheduler.ask(again) == SegmentDropped(again.op_id, 0)


async def test_copies_name_a_segment_by_its_epoch(stack: Stack) -> None:
    write = msgspec.structs.replace(stack.write([1], [5]), segment_epoch=stack.info.epoch - 1)
    load = msgspec.structs.replace(stack.load([5], [1]), storage_id="storage-1")
    for command in (write, load):
        failed = await stack.scheduler.ask(command)
        assert failed == OperationFailed(command.op_id, 0, "segment", -1, b"")


async def test_a_segment_of_another_geometry_or_model_is_refused(stack: Stack, tmp_path: Path) -> None:
    hello, scheduler = stack.hello, stack.scheduler
    wide = msgspec.structs.replace(hello.geometry, page_size=2 * PAGE)
    for geometry, model in ((wide, hello.model_fingerprint), (hello.geometry, bytes(32))):
        segment = create_segment(tmp_path, "storage-1", "test", new_epoch(), geometry, model, pages=4)
        command = MapSegment(scheduler.op(), segment.info("storage-1"))
        assert await scheduler.ask(command) == OperationFailed(command.op_id, 0, "segment", -1, b"")
        segment.close()
    missing: SegmentInfo = msgspec.structs.replace(stack.info, path=str(tmp_path / "gone"), epoch=1)
    command = MapSegment(scheduler.op(), missing)
    assert await scheduler.ask(command) == OperationFailed(command.op_id, 0, "segment", -1, b"")


async def test_a_scheduler_heard_again_gets_the_kept_answers(stack: Stack) -> None:
    scheduler, write = stack.scheduler, stack.write([1], [5])
    done = await scheduler.ask(write)
    scheduler.tell(Welcome("scheduler-0"))
    assert await scheduler.ask(write) == done


async def test_a_refusal_for_good_ends_the_service(config: Config) -> None:
    scheduler = FakeScheduler(config.scheduler_endpoint)
    worker = asyncio.create_task(service.serve(config, "worker", asyncio.Event()))
    try:
        await scheduler.receive(lambda _: True)
        scheduler.tell(Refused("another version", retry=False))
        with pytest.raises(ProtocolError, match="another version"):
            await asyncio.wait_for(worker, WAIT_S)
    finally:
        scheduler.close()


def test_a_worker_without_a_model_says_what_to_set() -> None:
    with pytest.raises(ModelError, match=r"model\.path"):
        build_engine(load_config(None, []))


def test_a_pool_that_does_not_fit_is_refused_with_the_numbers(model_folder: Path) -> None:
    settings = [f"model.path={model_folder}", "cache.device_tokens=1000000000000"]
    with pytest.raises(CapacityError, match=r"cache\.device_tokens"):
        build_engine(load_config(None, settings))


async def _consumed(hook: Path) -> None:
    async with asyncio.timeout(WAIT_S):
        while hook.exists():  # noqa: ASYNC110 - a file tells nobody that it goes
            await asyncio.sleep(0.01)


async def test_a_stuck_copy_keeps_its_memory_at_the_end(stack: Stack, hooks: Path, monkeypatch) -> None:
    monkeypatch.setattr(engine, "CLOSE_TIMEOUT_S", 0.1)
    test_hooks.arm(hooks, "worker_write", "sleep 0.6")
    stack.scheduler.tell(stack.write([1], [5]))
    await _consumed(hooks / "worker_write")
    assert not await asyncio.to_thread(stack.engine.close)
    assert not stack.engine.writes.query()
    await asyncio.sleep(0.7)
    assert await asyncio.to_thread(stack.engine.close)
