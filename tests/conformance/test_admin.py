"""Flush, drain and changes of L3 while the stack runs."""

import pytest

from services.scheduler.core.settings import TRANSFER_TIMEOUT_S
from shared.messages.common import OperationFailed
from shared.messages.gateway import Administer, Administered
from shared.messages.storage import BackendChanged, ChangeBackend, PrefetchPages
from shared.messages.worker import LoadPages, RunStep, WritePages
from shared.packed import unpack
from tests.conformance.harness import Harness

A = list(range(1, 9))  # four pages of two tokens
PROMPT = [*A, 9]
OTHER = list(range(40, 49))


def administer(core: Harness, action: str, storage: str = "") -> Administered:
    """Ask, and take the answer that comes at once."""
    core.answer(core.gateway, Administer(1, action, storage))
    return core.take(Administered)


def test_a_flush_forgets_device_and_host_pages_and_gives_every_id_back() -> None:
    core = Harness()
    core.compute(PROMPT)
    core.compute(OTHER)
    core.settle()
    answer = administer(core, "flush")
    assert (answer.refusal, answer.figures) == ("", {"device_pages": 8, "host_pages": 8, "kept_pages": 0})
    core.settle()
    assert core.nodes() == []
    assert core.core.state.device.available == core.core.state.device.total
    assert core.pool.available == core.pool.total
    core.nothing_left()


def test_what_runs_keeps_its_path_through_a_flush() -> None:
    core = Harness()
    core.compute(PROMPT)
    core.compute(OTHER)
    core.settle()
    request = core.submit(PROMPT, max_tokens=2)
    answer = administer(core, "flush")
    assert (answer.figures["device_pages"], answer.figures["kept_pages"]) == (4, 8)
    core.settle()
    assert core.ended[request].reason == "length"
    assert core.ended[request].usage.device_hit_tokens == 8
    assert core.match(OTHER).device_pages == 0


@pytest.mark.parametrize("held", [WritePages, LoadPages])
def test_a_flush_leaves_pages_that_a_copy_moves(held: type) -> None:
    core = Harness()
    if held is LoadPages:
        core.compute(PROMPT)
        core.settle()
        core.evict_device(4)
    core.submit(PROMPT)
    core.settle(held, *([RunStep] if held is LoadPages else []))
    assert core.pending(held)
    administer(core, "flush")
    core.settle()
    core.nothing_left()


def test_sc_08_a_flush_during_a_slow_l3_read_then_the_whole_host_pool_is_allocated() -> None:
    core = Harness(host=16, device=40)
    core.compute(OTHER)
    core.settle()
    request = core.submit(PROMPT)
    core.found(4)
    prefetch = core.pending(PrefetchPages)[0]
    reading = set(unpack(prefetch.pages).tolist())
    administer(core, "flush")
    core.settle(PrefetchPages)
    assert core.pool.available == core.pool.total - len(reading) == 12
    others = [core.submit(range(100 * n, 100 * n + 9)) for n in range(1, 5)]  # want more pages than there are
    core.settle(PrefetchPages)
    taken = [page for node in core.nodes() if node.host is not None for page in node.host.pages.tolist()]
    assert len(taken) == len(set(taken)) == core.pool.total - len(reading)
    assert not reading.intersection(taken)
    core.prefetch_done(0, 1, 2, 3)
    core.settle()
    assert {core.ended[each].reason for each in (request, *others)} == {"length"}
    core.nothing_left()


def test_a_flushed_page_is_explained() -> None:
    core = Harness()
    core.compute(PROMPT)
    core.settle()
    administer(core, "flush")
    core.settle()
    request = core.submit(PROMPT)
    core.settle()
    (explanation,) = core.core.why.of([request])
    missed = explanation["segments"][0]["missed"]
    for tier in ("device", "host"):
        assert (missed[tier]["reason"], missed[tier]["cause"]) == ("evicted", "flush")


def test_a_drained_storage_gives_its_pages_up_and_gets_no_new_ones_until_it_is_undrained() -> None:
    core = Harness()
    core.compute(PROMPT)
    core.settle()
    assert core.pool.cached == 4
    assert administer(core, "drain", "storage-0").figures == {"host_pages": 0}
    core.settle()
    core.compute(OTHER)
    core.settle()
    assert (core.pool.cached, core.pool.available) == (0, core.pool.total)
    administer(core, "undrain", "storage-0")
    core.compute(range(60, 69))
    core.settle()
    assert core.pool.cached == 4
    core.nothing_left()


def test_a_storage_that_comes_again_after_a_drain_takes_pages() -> None:
    core = Harness()
    administer(core, "drain", "storage-0")
    core.restart_storage()
    core.settle()
    core.compute(PROMPT)
    core.settle()
    assert core.pool.cached == 4
    core.nothing_left()


def test_a_page_that_is_read_leaves_a_drained_storage_when_the_copy_has_ended() -> None:
    core = Harness()
    core.compute(PROMPT)
    core.settle()
    core.evict_device(4)
    request = core.submit(PROMPT)
    assert core.pending(LoadPages)
    assert administer(core, "drain", "storage-0").figures == {"host_pages": 4}
    core.settle()
    assert core.ended[request].reason == "length"
    assert core.pool.cached == 0


@pytest.mark.parametrize("change", ["attach", "detach", "clear"])
def test_a_change_of_l3_is_answered_when_the_storage_has_made_it(change: str) -> None:
    core = Harness()
    core.answer(core.gateway, Administer(7, change, ""))
    command = core.take(ChangeBackend)
    assert command.change == change
    assert not core.pending(Administered)
    core.answer(core.storage, BackendChanged(command.op_id, ""))
    assert core.take(Administered) == Administered(7, "", {"storages": 1})
    core.nothing_left()


def test_a_change_that_fails_says_why() -> None:
    core = Harness()
    core.answer(core.gateway, Administer(7, "attach", "storage-0"))
    core.answer(core.storage, BackendChanged(core.take(ChangeBackend).op_id, "no such host"))
    assert core.take(Administered).refusal == "storage-0: no such host"
    core.answer(core.gateway, Administer(8, "clear", "storage-0"))
    command = core.take(ChangeBackend)
    core.answer(core.storage, OperationFailed(command.op_id, 0, "error", -1, b""))
    assert core.take(Administered).refusal == "storage-0: it failed (error): see its log"


def test_a_change_whose_storage_is_lost_is_answered_once() -> None:
    core = Harness()
    core.answer(core.gateway, Administer(7, "clear", ""))
    core.lose(core.storage)
    assert core.take(Administered).refusal == "storage-0: it was lost"
    core.wait(10 * TRANSFER_TIMEOUT_S)
    assert not core.pending(Administered)


def test_a_change_is_not_asked_of_a_storage_that_is_lost_already() -> None:
    core = Harness()
    core.lose(core.storage)
    assert administer(core, "clear").refusal == "storage-0: it was lost"
    assert not core.pending(ChangeBackend)


@pytest.mark.parametrize(
    ("action", "storage", "why"),
    [
        ("drain", "", "say which storage"),
        ("drain", "storage-9", "there are: storage-0"),
        ("flush", "storage-0", "name no storage"),
    ],
)
def test_what_makes_no_sense_is_refused(action: str, storage: str, why: str) -> None:
    assert why in administer(Harness(), action, storage).refusal
