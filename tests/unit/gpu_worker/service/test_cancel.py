"""Cancel: what stops, what doesn't, and who is told."""

import asyncio

import pytest

from shared.messages.common import Cancel, Cancelled
from shared.messages.worker import RunStep, StepDone, StepFailed
from tests.unit.gpu_worker.service.fake_scheduler import WAIT_S, Stack, item
from tests.unit.gpu_worker.service.gate import Gate


async def test_cancel_stops_a_running_load_and_one_that_waits(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    stack.fill([1, 2])
    await stack.back_up([1, 2], [5, 6])
    gate = Gate(monkeypatch, "worker_load", visit=2)
    scheduler, running, waiting = stack.scheduler, stack.load([5], [10]), stack.load([6], [11])
    untouched = stack.bytes_of(11)
    scheduler.tell(running)
    scheduler.tell(waiting)
    scheduler.tell(Cancel(scheduler.op(), waiting.op_id))
    assert await scheduler.answer(waiting.op_id) == Cancelled(waiting.op_id, 0, b"")
    assert await asyncio.to_thread(gate.reached.wait, WAIT_S)
    scheduler.tell(Cancel(scheduler.op(), running.op_id))
    assert await scheduler.silence(running.op_id)
    gate.open.set()
    assert await scheduler.answer(running.op_id) == Cancelled(running.op_id, 0, b"")
    assert stack.bytes_of(11) == untouched
    failed = await scheduler.ask(RunStep(scheduler.op(), [item(8, [1], [10, 11, 12])], [running.op_id, waiting.op_id]))
    assert failed == StepFailed(failed.op_id, 0, "load", [running.op_id, waiting.op_id])


@pytest.mark.parametrize("which", [0, 1], ids=["running", "waiting"])
async def test_a_step_that_waits_for_a_cancelled_load_fails(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, which: int
) -> None:
    await stack.back_up([1, 2], [5, 6])
    gate = Gate(monkeypatch, "worker_load", visit=1)
    scheduler, loads = stack.scheduler, (stack.load([5], [10]), stack.load([6], [11]))
    for load in loads:
        scheduler.tell(load)
    step = RunStep(scheduler.op(), [item(4, [1], [10 + which, 12])], [loads[which].op_id])
    scheduler.tell(step)
    assert await asyncio.to_thread(gate.reached.wait, WAIT_S)
    scheduler.tell(Cancel(scheduler.op(), loads[which].op_id))
    assert await scheduler.silence(loads[0].op_id)
    gate.open.set()
    assert await scheduler.answer(step.op_id) == StepFailed(step.op_id, 0, "load", [loads[which].op_id])
    assert await scheduler.answer(loads[which].op_id) == Cancelled(loads[which].op_id, 0, b"")


async def test_cancel_of_what_is_done_repeats_its_answer(stack: Stack) -> None:
    scheduler, write = stack.scheduler, stack.write([1], [5])
    done = await scheduler.ask(write)
    scheduler.tell(Cancel(scheduler.op(), write.op_id))
    assert await scheduler.answer(write.op_id) == done


async def test_cancel_of_what_has_not_come_keeps_it_from_beginning(stack: Stack) -> None:
    scheduler, write = stack.scheduler, stack.write([1], [5])
    stack.fill([1])
    scheduler.tell(Cancel(scheduler.op(), write.op_id))
    assert await scheduler.answer(write.op_id) == Cancelled(write.op_id, 0, b"")
    assert await scheduler.ask(write) == Cancelled(write.op_id, 0, b"")
    assert not stack.segment.pages_array[5].any()


async def test_a_step_that_waits_is_not_cancelled(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch, "worker_step", visit=1)
    scheduler = stack.scheduler
    running, waiting = (RunStep(scheduler.op(), [item(0, [1, 2, 3], [row], row=row)], []) for row in (1, 2))
    for step in (running, waiting):
        scheduler.tell(step)
        scheduler.tell(Cancel(scheduler.op(), step.op_id))
    assert await scheduler.silence(waiting.op_id)
    gate.open.set()
    assert isinstance(await scheduler.answer(running.op_id), StepDone)
    assert isinstance(await scheduler.answer(waiting.op_id), StepDone)
