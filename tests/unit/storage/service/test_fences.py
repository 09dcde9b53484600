"""Cancel, Fence, and another scheduler, while I/O threads are busy with pages."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from shared.messages.common import Cancel, Cancelled, Fenced
from shared.messages.storage import ArchiveDone, OpenSegment, PrefetchDone, PrefetchProgress, SegmentOpened
from shared.packed import unpack
from tests.unit.storage.pages import GEOMETRY, MODEL, Page, put
from tests.unit.storage.service.conftest import Stack, slow_reads

SLOW_S = 0.15


async def in_l3(stack: Stack, count: int) -> list[int]:
    assert stack.service.leases[0]._model is not None
    await put(stack.service.leases[0]._model, *range(count))
    return list(range(count))


def unnamed(stack: Stack, pages: list[int]) -> list[int]:
    return [page for page in pages if stack.worker.name_of(page) is None]


async def test_a_cancelled_prefetch_stops_at_a_page_and_says_what_is_named(stack: Stack, hooks: Path) -> None:
    scheduler, numbers = stack.scheduler, await in_l3(stack, 32)
    pages = [1 + n for n in numbers]
    slow_reads(hooks, SLOW_S)
    request = scheduler.tell(scheduler.prefetch(pages, numbers))
    progress = await scheduler.answer(request.op_id)
    assert isinstance(progress, PrefetchProgress)
    scheduler.tell(Cancel(scheduler.op(), request.op_id))
    start_s = time.monotonic()
    cancelled = await scheduler.receive(lambda message: isinstance(message, Cancelled))
    assert time.monotonic() - start_s < 8 * SLOW_S  # the 24 pages that were left would take 12
    assert cancelled.op_id == request.op_id
    named = unpack(cancelled.named).tolist()
    assert 8 <= len(named) < 32
    assert all(stack.holds(pages[each], numbers[each]) for each in named)
    rest = [page for position, page in enumerate(pages) if position not in named]
    assert unnamed(stack, rest) == rest
    stack.worker.pages_array[rest] = 0xAB
    await asyncio.sleep(3 * SLOW_S)
    assert (stack.worker.pages_array[rest] == 0xAB).all()
    assert await scheduler.ask(request) == cancelled


async def test_every_cancel_is_answered_by_its_target(stack: Stack) -> None:
    scheduler, numbers = stack.scheduler, await in_l3(stack, 2)
    done = await scheduler.ask(scheduler.find(numbers))
    cancel = scheduler.tell(Cancel(scheduler.op(), done.op_id))
    assert await scheduler.answer(done.op_id) == done
    assert await scheduler.silence(cancel.op_id)


async def test_a_cancel_that_overtakes_its_target_keeps_it_from_beginning(stack: Stack) -> None:
    scheduler, numbers = stack.scheduler, await in_l3(stack, 2)
    late = scheduler.find(numbers)
    scheduler.tell(Cancel(scheduler.op(), late.op_id))
    cancelled = Cancelled(late.op_id, 0, b"")
    assert await scheduler.answer(late.op_id) == cancelled
    assert await scheduler.ask(late) == cancelled


async def test_a_command_that_a_fence_overtook_is_stale(stack: Stack) -> None:
    scheduler, numbers = stack.scheduler, await in_l3(stack, 2)
    late = scheduler.find(numbers)
    await scheduler.ask(scheduler.fence())
    assert (await scheduler.ask(late)).reason == "stale"


async def test_a_fence_waits_until_no_thread_touches_a_page(stack: Stack, hooks: Path) -> None:
    scheduler, numbers = stack.scheduler, await in_l3(stack, 8)
    pages = [1 + n for n in numbers]
    slow_reads(hooks, 4 * SLOW_S)
    request = scheduler.tell(scheduler.prefetch(pages, numbers))
    assert await scheduler.silence(request.op_id, SLOW_S)
    start_s = time.monotonic()
    fence = scheduler.tell(scheduler.fence())
    first = await scheduler.receive(lambda message: isinstance(message, Fenced | Cancelled))
    assert isinstance(first, Cancelled)
    assert first.op_id == request.op_id
    assert time.monotonic() - start_s > SLOW_S
    assert await scheduler.answer(fence.op_id) == Fenced(fence.op_id, 0)
    free = unnamed(stack, pages)
    assert len(free) == len(pages) - len(unpack(first.named))
    stack.worker.pages_array[free] = 0xAB
    await asyncio.sleep(5 * SLOW_S)
    assert (stack.worker.pages_array[free] == 0xAB).all()


async def test_a_fence_waits_for_a_segment_that_is_being_opened(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, backend = stack.scheduler, stack.service.leases[0].backend
    of_model = backend.of_model

    async def slow(*of_what: Any) -> Any:
        await asyncio.sleep(SLOW_S)
        return await of_model(*of_what)

    monkeypatch.setattr(backend, "of_model", slow)
    opened = scheduler.tell(OpenSegment(scheduler.op(), GEOMETRY, MODEL, False))
    fence = scheduler.tell(scheduler.fence())
    answers = [await scheduler.receive(lambda message: isinstance(message, SegmentOpened | Fenced)) for _ in range(2)]
    assert [answer.op_id for answer in answers] == [opened.op_id, fence.op_id]


async def test_a_fence_leaves_later_operations_alone(stack: Stack, hooks: Path) -> None:
    scheduler, numbers = stack.scheduler, await in_l3(stack, 2)
    slow_reads(hooks, SLOW_S)
    fence = scheduler.fence()
    later = scheduler.tell(scheduler.prefetch([1, 2], numbers))
    assert await scheduler.ask(fence) == Fenced(fence.op_id, 0)
    done = await scheduler.receive(lambda message: isinstance(message, PrefetchDone))
    assert done.op_id == later.op_id
    assert len(unpack(done.named)) == 2


async def test_a_fence_ends_a_running_archive(stack: Stack) -> None:
    scheduler, numbers = stack.scheduler, list(range(40))
    pages = [1 + n for n in numbers]
    stack.fill(pages, numbers)
    await scheduler.ask(scheduler.commit(pages, numbers))
    request = scheduler.tell(scheduler.archive(pages, numbers))
    fence = scheduler.tell(scheduler.fence())
    answer = await scheduler.answer(request.op_id)
    assert isinstance(answer, Cancelled | ArchiveDone)
    assert await scheduler.answer(fence.op_id) == Fenced(fence.op_id, 0)
    assert unnamed(stack, pages) == []


async def test_a_new_scheduler_fences_what_the_old_one_started(stack: Stack, hooks: Path) -> None:
    scheduler, numbers = stack.scheduler, await in_l3(stack, 8)
    stack.fill([20], [20])
    await scheduler.ask(scheduler.commit([20], [20]))
    slow_reads(hooks, 4 * SLOW_S)
    old = scheduler.tell(scheduler.prefetch([1 + n for n in numbers], numbers))
    assert await scheduler.silence(old.op_id, SLOW_S)
    hello = await scheduler.restart()
    assert hello.segment == scheduler.segment
    assert [(holder.identity, holder.epoch) for holder in hello.holders] == [("worker-0", 7)]
    start_s = time.monotonic()
    fence = scheduler.tell(scheduler.fence())
    assert fence.op_id == old.op_id - 2
    assert await scheduler.answer(fence.op_id) == Fenced(fence.op_id, 0)
    assert time.monotonic() - start_s > SLOW_S
    assert len(unnamed(stack, [1 + n for n in numbers])) >= 6
    assert stack.holds(20, 20)  # until the new scheduler releases it
    await scheduler.ask(scheduler.release(range(1, 30)))
    assert stack.worker.name_of(20) is None


async def test_a_repeated_command_that_still_runs_is_not_done_twice(stack: Stack, hooks: Path) -> None:
    scheduler, numbers = stack.scheduler, await in_l3(stack, 2)
    slow_reads(hooks, SLOW_S)
    request = scheduler.tell(scheduler.prefetch([1, 2], numbers))
    scheduler.tell(request)
    done = await scheduler.receive(lambda message: isinstance(message, PrefetchDone))
    assert done.op_id == request.op_id
    assert stack.service.leases[0].stats()["l3_get_pages"] == 2
    assert stack.holds(1, 0)
    assert Page(0).digest != Page(1).digest
