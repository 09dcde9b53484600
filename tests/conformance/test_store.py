"""STORE-05 and STORE-06: what goes to L3, and what comes from it."""

import pytest

from services.scheduler.core.request import RequestState
from services.scheduler.core.settings import PREFETCH_BASE_S
from shared.messages.common import Cancel
from shared.messages.storage import ArchivePages, FindPages, PrefetchPages, PrefetchProgress
from shared.messages.worker import LoadPages, RunStep
from shared.packed import pack, unpack
from shared.page_hash import chain
from tests.conformance.harness import Harness

A = list(range(1, 9))
PROMPT = [*A, 9]


def test_store_05_pages_go_to_l3_at_committed() -> None:
    core = Harness(prefetch=False)
    core.submit(PROMPT)
    core.step_done()
    core.write_done()
    assert not core.pending(ArchivePages)
    core.committed()
    (archive,) = core.pending(ArchivePages)
    assert archive.digests == b"".join(chain(b"", pack(A), 2))
    core.archived()
    core.nothing_left()


def test_store_05_beyond_a_quarter_of_the_pool_archives_are_dropped_and_counted() -> None:
    core = Harness(prefetch=False, host=16)
    core.submit(PROMPT)
    core.submit(range(20, 29))
    core.settle(ArchivePages)
    assert len(core.pending(ArchivePages)) == 1
    assert core.core.state.counters["archive_dropped_pages"] == 4


def test_store_06_only_what_l3_has_is_fetched_and_then_used() -> None:
    core = Harness()
    request = core.submit(PROMPT)
    assert not core.pending(RunStep)
    core.found(3)
    (prefetch,) = core.pending(PrefetchPages)
    assert len(unpack(prefetch.pages)) == 3
    core.prefetch_done(0, 1, 2)
    core.settle()
    assert core.ended[request].usage.storage_hit_tokens == 6
    core.nothing_left()


def test_store_06_below_the_threshold_nothing_is_asked_or_fetched() -> None:
    core = Harness(prefetch_threshold=10)
    core.submit(PROMPT)
    assert not core.pending(FindPages)
    core = Harness(prefetch_threshold=8)
    core.submit(PROMPT)
    core.found(3)
    assert not core.pending(PrefetchPages)
    assert core.pending(RunStep)


def test_store_06_a_partial_result_is_used_up_to_its_first_gap() -> None:
    core = Harness()
    request = core.submit(PROMPT)
    core.found(4)
    core.prefetch_done(0, 2, 3)
    core.settle()
    assert core.ended[request].usage.storage_hit_tokens == 2
    core.nothing_left()


def test_store_06_the_timeout_policy_goes_on_with_what_is_there() -> None:
    core = Harness()
    request = core.submit(PROMPT)
    core.found(4)
    (prefetch,) = core.pending(PrefetchPages)
    core.answer(core.storage, PrefetchProgress(prefetch.op_id, pack([0, 1])))
    core.wait(PREFETCH_BASE_S + 0.1)
    assert core.take(Cancel).target == prefetch.op_id
    assert core.pending(LoadPages)
    core.settle(PrefetchPages)
    assert core.ended[request].usage.storage_hit_tokens == 4
    core.prefetch_done(0, 1, 2)  # one page more was named meanwhile: it is released
    core.settle()
    core.nothing_left()


def test_store_06_progress_that_another_process_reports_counts_for_nothing() -> None:
    core = Harness()
    request = core.submit(PROMPT)
    core.found(4)
    (prefetch,) = core.pending(PrefetchPages)
    core.answer(core.worker, PrefetchProgress(prefetch.op_id, pack([0, 1])))
    core.wait(PREFETCH_BASE_S + 0.1)
    assert not core.pending(LoadPages)
    core.prefetch_done()
    core.settle()
    assert core.ended[request].usage.storage_hit_tokens == 0
    core.nothing_left()


def test_store_06_wait_complete_waits() -> None:
    core = Harness(prefetch_policy="wait_complete")
    core.submit(PROMPT)
    core.found(4)
    core.wait(60.0)
    assert not core.pending(RunStep)
    core.prefetch_done(0, 1, 2, 3)
    core.settle()
    core.nothing_left()


def test_store_06_best_effort_runs_as_soon_as_there_is_room_in_a_step() -> None:
    core = Harness(prefetch_policy="best_effort", max_running=1, prefetch_threshold=8)
    core.submit(range(20, 24), max_tokens=2)
    request = core.submit(PROMPT)
    core.found(4)
    (prefetch,) = core.pending(PrefetchPages)
    core.answer(core.storage, PrefetchProgress(prefetch.op_id, pack([0])))
    core.step_done()
    core.step_done()
    core.settle(PrefetchPages)
    assert core.ended[request].usage.storage_hit_tokens == 2
    core.prefetch_done(0)
    core.settle()
    core.nothing_left()


def test_store_06_requests_with_the_same_next_page_share_one_fetch() -> None:
    core = Harness()
    first, second = core.submit(PROMPT), core.submit([*A, 10])
    assert len(core.pending(FindPages)) == 1
    core.found(4)
    core.prefetch_done(0, 1, 2, 3)
    core.settle()
    assert core.ended[first].usage.storage_hit_tokens == 8
    assert core.ended[second].usage.device_hit_tokens == 8  # it shares the first one's load
    core.nothing_left()


def test_store_06_a_fetch_joined_by_a_longer_prompt_keeps_to_the_tokens_it_was_asked_for() -> None:
    core = Harness()
    first = core.submit([*A, 9])
    core.submit([1, 2, 3, 4, 50, 51, 52, 53, 54])
    core.abort(first)
    core.found(4)  # of the first one's digests
    core.prefetch_done(0, 1, 2, 3)
    assert core.match(A).host_pages + core.match(A).device_pages == 4
    assert core.match([1, 2, 3, 4, 50, 51]).host_pages + core.match([1, 2, 3, 4, 50, 51]).device_pages <= 2
    core.settle()
    core.nothing_left()


def test_store_06_at_most_a_quarter_of_the_pool_is_pinned_by_prefetches() -> None:
    core = Harness(host=16)
    core.submit(range(1, 16))
    core.found(7)
    assert len(unpack(core.pending(PrefetchPages)[0].pages)) == 4
    core.submit(range(30, 39))
    core.found(4)
    assert len(core.pending(PrefetchPages)) == 1  # the second waits for the first
    core.prefetch_done(0, 1, 2, 3)
    core.settle()
    core.nothing_left()


@pytest.mark.parametrize("ends", ["error", "lost"])
def test_store_06_a_lookup_that_never_answers_costs_time_and_no_answer(ends: str) -> None:
    core = Harness()
    request = core.submit(PROMPT)
    if ends == "lost":
        core.lose(core.storage)
    else:
        core.wait(2.1)
    (waiting,) = core.core.requests.all.values()
    assert waiting.state is RequestState.RUNNING
    core.settle(FindPages)
    assert core.ended[request].usage.completion_tokens == 1


def test_store_06_a_waiting_lookup_gives_back_what_its_request_has_reserved_too() -> None:
    core = Harness(device=12, host=16, prefetch_policy="wait_complete", write_policy="write_through_selective")
    core.compute(PROMPT)
    core.submit(range(90, 95))
    core.found(0)
    alone = core.submit(range(60, 81))  # all of the device
    core.found(0)
    core.submit([*A, *range(20, 24), 1])
    core.submit([*A, *range(20, 32), 1])
    core.found(2)
    core.prefetch_done(0, 1)
    core.found(4)  # the second request's: too much beside what the first one keeps
    assert len(core.core.prefetcher.hungry()) == 1
    core.step_done()
    (running,) = core.core.requests.running
    assert running.key.request_id == alone


def test_store_06_a_lookup_that_waits_for_host_pages_ends_when_their_storage_is_lost() -> None:
    core = Harness(device=8, host=16, prefetch_policy="wait_complete")
    core.submit(range(70, 83))  # the device is full
    core.found(0)
    core.submit(range(50, 59))
    core.found(4)  # the prefetches' whole share, until it is admitted
    core.prefetch_done(*range(4))
    core.submit([*A, 20, 21, 22, 23, 24])
    core.found(2)
    assert len(core.core.prefetcher.hungry()) == 1
    core.lose(core.storage)
    assert core.core.prefetcher.hungry() == []


def test_store_06_lookups_that_wait_for_host_pages_give_way_to_a_request_that_can_run() -> None:
    core = Harness(device=8, host=16, prefetch_policy="wait_complete")
    core.compute(PROMPT)
    core.submit(range(50, 59))
    core.found(4)  # the prefetches' whole share
    core.submit([*A, 20, 21, 22, 23, 24])
    core.found(2)  # waits for the share, and locks A meanwhile
    assert core.core.state.tree.protected == 4
    core.submit(range(60, 73))
    core.found(0)
    (step,) = core.pending(RunStep)
    assert step.items[0].tokens == pack(range(60, 73))
    core.settle()
    core.nothing_left()
