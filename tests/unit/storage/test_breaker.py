"""STORE-07: when a store is left alone, and when it is tried again."""

import asyncio
import threading
from contextlib import nullcontext
from unittest import mock

import pytest

from services.storage.backend import Backend, BatchRead, StoreLostError
from services.storage.breaker import (
    FAILURES_IN_A_ROW,
    FIRST_BACK_OFF_S,
    LONGEST_BACK_OFF_S,
    OVERDUE,
    Breaker,
    BreakerBackend,
)
from shared.errors import StorageError

DEADLINE_S = 20.0  # for what takes no time


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def lost() -> int:
    raise StoreLostError("gone")


async def fine() -> int:
    return 7


async def test_store_07_failures_in_a_row_detach_and_a_success_between_them_does_not() -> None:
    breaker = Breaker(1.0)
    for _ in range(FAILURES_IN_A_ROW - 1):
        assert await breaker.guard(lost(), 0) == 0
    assert await breaker.guard(fine(), 0) == 7
    for _ in range(FAILURES_IN_A_ROW - 1):
        await breaker.guard(lost(), 0)
    assert breaker.attached
    await breaker.guard(lost(), 0)
    assert (breaker.attached, breaker.detached, breaker.failures) == (False, 1, 2 * FAILURES_IN_A_ROW - 1)


async def test_store_07_the_back_off_doubles_up_to_its_limit_and_starts_anew_after_a_success() -> None:
    clock = Clock()
    inner = mock.create_autospec(Backend, instance=True)
    backend = BreakerBackend(inner, 1.0, clock)
    inner.start.side_effect = inner.refresh.side_effect = StoreLostError("gone")
    await backend.start()
    waits = []
    for _ in range(10):
        before_s, calls = clock.now_s, inner.refresh.call_count
        while inner.refresh.call_count == calls:
            clock.now_s += 0.5
            await backend.refresh()
        waits.append(clock.now_s - before_s)
    assert waits[:4] == [FIRST_BACK_OFF_S, 2 * FIRST_BACK_OFF_S, 4 * FIRST_BACK_OFF_S, 8 * FIRST_BACK_OFF_S]
    assert waits[-1] == LONGEST_BACK_OFF_S
    inner.refresh.side_effect = None
    clock.now_s += LONGEST_BACK_OFF_S
    await backend.refresh()
    assert backend.breaker.attached
    await backend.breaker.guard(fine(), 0)
    for _ in range(FAILURES_IN_A_ROW):
        await backend.breaker.guard(lost(), 0)
    assert not backend.breaker.attached
    assert not backend.breaker.due()
    clock.now_s += FIRST_BACK_OFF_S
    assert backend.breaker.due()


async def test_store_07_after_a_trial_that_worked_one_failure_detaches_again() -> None:
    breaker = Breaker(1.0)
    breaker.detach("gone")
    breaker.attach()
    await breaker.guard(lost(), 0)
    assert not breaker.attached


async def test_store_07_a_batch_that_hangs_counts_when_it_is_overdue_and_only_once() -> None:
    breaker, end = Breaker(0.02), asyncio.Event()
    hanging = asyncio.create_task(breaker.guard(end.wait(), False))
    await asyncio.sleep(0.02 * OVERDUE + 0.05)
    assert breaker.failures == 1
    end.set()
    assert await hanging is True
    assert breaker.failures == 1


async def test_store_07_a_write_may_wait_behind_others() -> None:
    breaker = Breaker(0.02)
    await breaker.guard(asyncio.sleep(0.02 * OVERDUE + 0.05), None, may_queue=True)
    assert breaker.failures == 0
    assert await breaker.guard(lost(), 0, may_queue=True) == 0
    assert breaker.failures == 1


async def test_store_07_a_trial_that_fails_for_any_reason_does_not_end_the_service() -> None:
    inner = mock.create_autospec(Backend, instance=True)
    backend = BreakerBackend(inner, 1.0)
    inner.refresh.side_effect = StorageError("odd")
    for _ in range(FAILURES_IN_A_ROW):
        await backend.refresh()
    assert not backend.breaker.attached


async def test_store_07_one_bad_page_says_nothing_of_the_store() -> None:
    inner = mock.create_autospec(Backend, instance=True)
    backend = BreakerBackend(inner, 1.0)
    pages = await backend.of_model(b"m" * 32, mock.Mock())
    read = inner.of_model.return_value.batch_get
    read.return_value = BatchRead([mock.Mock(), None], 0, 1)
    for _ in range(FAILURES_IN_A_ROW):
        await pages.batch_get([b"a", b"b"], [memoryview(b""), memoryview(b"")], mock.Mock())
    assert backend.breaker.failures == 0
    read.return_value = BatchRead([None, None], 0, 2)
    for _ in range(FAILURES_IN_A_ROW):
        await pages.batch_get([b"a", b"b"], [memoryview(b""), memoryview(b"")], mock.Mock())
    assert not backend.breaker.attached


async def test_store_07_an_error_of_ours_is_not_taken_for_the_stores() -> None:
    async def wrong() -> int:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        await Breaker(1.0).guard(wrong(), 0)


async def test_metric_01_batches_of_a_store_are_timed_and_those_of_a_detached_one_are_not() -> None:
    clock = Clock()
    inner = mock.create_autospec(Backend, instance=True, stats=dict)

    async def slow(*_: object) -> BatchRead:
        clock.now_s += 0.02
        return BatchRead([None], 0)

    inner.of_model.return_value.batch_get = slow
    backend = BreakerBackend(inner, 1.0, clock)
    pages = await backend.of_model(b"model", mock.Mock())
    for _ in range(3):
        await pages.batch_get([b"d"], [memoryview(b"page")], threading.Event())
    backend.breaker.detach("tried")
    await pages.batch_get([b"d"], [memoryview(b"page")], threading.Event())
    told = backend.stats()
    assert told["l3_get_seconds"] == pytest.approx(0.06)
    assert [told[f"l3_get_{name}"] for name in ("batches", "le_0.01", "le_0.03", "le_10")] == [3, 0, 3, 3]
    assert told["l3_set_batches"] == 0


@pytest.mark.parametrize("trial", ["refresh", "attach"])
async def test_who_detaches_during_a_trial_has_the_last_word(trial: str) -> None:
    inner, clock = mock.create_autospec(Backend, instance=True), Clock()
    backend = BreakerBackend(inner, 1.0, clock)
    backend.breaker.detach("gone")
    clock.now_s += FIRST_BACK_OFF_S
    inner.refresh.side_effect = backend.detach
    with pytest.raises(StorageError, match="detached again") if trial == "attach" else nullcontext():
        await getattr(backend, trial)()
    assert inner.refresh.call_count == 1
    assert not backend.breaker.attached
    clock.now_s += LONGEST_BACK_OFF_S
    await backend.refresh()
    assert inner.refresh.call_count == 1
    inner.refresh.side_effect = None
    await backend.attach()
    assert backend.breaker.attached


async def test_a_scan_that_began_before_the_store_was_detached_attaches_nothing() -> None:
    inner = mock.create_autospec(Backend, instance=True)
    backend = BreakerBackend(inner, 1.0)
    inner.refresh.side_effect = lambda: backend.breaker.detach("gone")
    await backend.refresh()
    assert not backend.breaker.attached


async def test_an_attachment_that_fails_is_tried_again_unless_it_was_detached_meanwhile() -> None:
    inner, clock = mock.create_autospec(Backend, instance=True), Clock()
    backend = BreakerBackend(inner, 1.0, clock)

    def detach_and_fail() -> None:
        backend.detach()
        raise StorageError("gone")

    backend.detach()
    for failure, retried in ((StorageError("gone"), True), (detach_and_fail, False)):
        inner.refresh.side_effect = failure
        with pytest.raises(StorageError, match="gone"):
            await backend.attach()
        clock.now_s += LONGEST_BACK_OFF_S
        assert backend.breaker.due() is retried


@pytest.mark.parametrize("trial", ["refresh", "attach"])
async def test_store_07_a_store_that_hangs_as_a_model_is_opened_holds_nobody_up_and_is_tried_again(trial: str) -> None:
    inner, clock = mock.create_autospec(Backend, instance=True, info=mock.Mock()), Clock()
    backend = BreakerBackend(inner, 0.01, clock)
    there = inner.of_model.return_value

    async def hang(*_: object) -> None:
        await asyncio.Event().wait()

    inner.of_model.side_effect = hang
    async with asyncio.timeout(DEADLINE_S):
        pages = await backend.of_model(b"model", mock.Mock())
    assert not backend.breaker.attached
    assert await pages.batch_exists([b"d"]) == 0
    inner.of_model.side_effect = None
    there.batch_exists.return_value = 1
    clock.now_s += FIRST_BACK_OFF_S
    await getattr(backend, trial)()
    assert backend.breaker.attached
    assert await pages.batch_exists([b"d"]) == 1
