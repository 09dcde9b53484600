"""Reasons that need a full pool, a copy that fails, an administrator or an earlier scheduler."""

from services.scheduler.core.settings import MAX_LOAD_FAILURES, MAX_LOOKUPS
from shared.messages.gateway import Administer
from shared.messages.storage import PrefetchPages
from shared.messages.worker import WritePages
from tests.conformance.harness import Harness
from tests.conformance.test_adoption import a_core_that_finds, named_pages
from tests.conformance.test_why import OTHER, PROMPT, A, explained, reasons


def test_why_evicted_from_the_host_for_a_prefetch_names_its_request() -> None:
    core = Harness(host=16)
    for start in (20, 40, 60, 80):
        core.compute(range(start, start + 9))  # the host pool is full
    taker = core.submit(PROMPT)
    core.found(4)
    core.settle(PrefetchPages)
    core.prefetch_done(0, 1, 2, 3)
    core.settle()
    core.evict_device(12)
    request = core.compute(range(20, 29))
    fate = explained(core, request)[0]["missed"]["host"]
    assert (fate["reason"], fate["cause"], fate["request_id"]) == ("evicted", "prefetch", taker)


def test_why_evicted_from_the_host_as_an_earlier_scheduler_s() -> None:
    core = a_core_that_finds(named_pages(), pages=8)
    core.compute(OTHER)
    core.compute(range(60, 69))  # memory is short: what nobody has asked for goes first
    request = core.compute(PROMPT)
    assert reasons(core, request)["host"] == ("evicted", "orphaned")


def test_why_evicted_by_a_drain() -> None:
    core = Harness()
    core.compute(PROMPT)
    core.evict_device(4)
    core.answer(core.gateway, Administer(1, "drain", "storage-0"))
    core.settle()
    request = core.compute(PROMPT)
    assert reasons(core, request)["host"] == ("evicted", "drain")


def test_why_dropped_for_want_of_a_host_page_for_a_prefetch() -> None:
    core = Harness(device=40, host=16)
    for start in (20, 40, 60, 80):
        core.submit(range(start, start + 9))
    core.settle(WritePages)  # each page of the host pool waits for its backup
    request = core.submit(PROMPT)
    core.found(4)
    core.settle(WritePages)
    assert reasons(core, request)["storage"] == ("dropped", "no_host_page")


def test_why_dropped_when_a_prefetch_is_dismissed_for_an_older_request() -> None:
    core = Harness(device=8, host=16, prefetch_policy="wait_complete")
    core.compute(PROMPT)
    core.submit(range(50, 59))
    core.found(4)  # the prefetches' whole share
    dismissed = core.submit([*A, 20, 21, 22, 23, 24])
    core.found(2)  # waits for the share, and locks A meanwhile
    core.submit(range(60, 73))
    core.found(0)  # can run, if A may go
    core.settle()
    assert reasons(core, dismissed)["storage"] == ("dropped", "dismissed")


def test_why_failed_to_be_backed_up() -> None:
    core = Harness()
    core.submit(PROMPT)
    core.settle(WritePages)
    core.refuse(core.worker, core.take(WritePages), "error")
    core.settle()
    core.evict_device(4)
    request = core.compute(PROMPT)
    assert reasons(core, request)["host"] == ("failed", "write_backup")


def test_why_failed_to_be_loaded() -> None:
    core = Harness()
    core.compute(PROMPT)
    core.evict_device(4)
    request = core.submit(PROMPT)
    for _ in range(MAX_LOAD_FAILURES):
        core.load_failed(reason="error")
        core.step_failed("load")
    core.settle()
    assert reasons(core, request) == {
        "device": ("behind_gap", "load_back"),
        "host": ("failed", "load_back"),
        "storage": ("not_asked", ""),
    }


def test_why_not_asked_after_as_many_lookups_as_a_request_may_make() -> None:
    core = Harness(device=40, host=64, prefetch_policy="best_effort")
    core.submit(OTHER, max_tokens=20)
    core.found(0)
    slow = core.submit([*A, *range(20, 28), 9])
    for at in range(MAX_LOOKUPS):
        core.submit([*A[: 2 * at + 2], 60], priority=1)  # joins, and at its admission ends the fetch for both
        core.found(4)
        core.step_done()
    core.settle()
    assert reasons(core, slow)["storage"] == ("not_asked", "lookups")
