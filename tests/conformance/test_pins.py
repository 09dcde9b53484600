"""Pins: prefixes that stay for a time, and never at the price of a request."""

import pytest

from services.scheduler.core.events import DeadlineReached
from services.scheduler.core.status import status
from shared.messages.gateway import Administer, Administered, Namespace
from shared.packed import pack
from tests.conformance.harness import DEFAULT, Harness

A = list(range(1, 9))  # four pages of two tokens
PROMPT = [*A, 9]
OTHERS = [list(range(100 * n, 100 * n + 9)) for n in range(1, 7)]


def pin(core: Harness, tokens: list[int], ttl_s: float = 60.0, namespace: Namespace = DEFAULT) -> Administered:
    core.answer(core.gateway, Administer(1, "pin", tokens=pack(tokens), ttl_s=ttl_s, namespace=namespace))
    return core.take(Administered)


def unpin(core: Harness, number: int) -> str:
    core.answer(core.gateway, Administer(1, "unpin", pin=number))
    return core.take(Administered).refusal


def cached(**settings: int) -> Harness:
    core = Harness(**{"device": 16, "host": 24, **settings})
    core.compute(PROMPT)
    core.settle()
    return core


def test_a_pinned_prefix_outlives_pressure_and_goes_after_its_time() -> None:
    core = cached()
    assert pin(core, PROMPT).figures == {"pin": 1, "pages": 4}
    for other in OTHERS:
        core.compute(other)
    core.settle()
    assert core.match(PROMPT).device_pages == 4
    core.wait(60.0)
    assert len(core.core.admin.pins) == 0
    for other in OTHERS:
        core.compute([token + 1000 for token in other])
    core.settle()
    assert core.match(PROMPT).device_pages == 0
    core.nothing_left()


def test_a_pin_ends_at_its_deadline_though_nothing_else_happens() -> None:
    core = cached()
    pin(core, PROMPT, ttl_s=7.0)
    deadline = core.core.next_deadline()
    assert deadline == core.now + 7.0
    core.now = deadline
    core.feed(DeadlineReached())
    core.nothing_left()


def test_sc_11_a_pin_ends_once() -> None:
    core = cached()
    number = pin(core, PROMPT).figures["pin"]
    assert unpin(core, number) == ""
    assert "there is no pin 1" in unpin(core, number)
    assert "there is no pin 9" in unpin(core, 9)
    core.nothing_left()


def test_pins_hold_at_most_a_quarter_of_the_device_and_only_what_is_there() -> None:
    core = cached()
    core.compute(OTHERS[0])
    assert pin(core, PROMPT).refusal == ""
    assert "a quarter of the device pool" in pin(core, OTHERS[0]).refusal
    unpin(core, 1)
    assert "no whole page" in pin(core, OTHERS[1]).refusal
    assert "no whole page" in pin(core, PROMPT, namespace=Namespace(tenant="other")).refusal
    core.nothing_left()


def test_pins_hold_at_most_their_bytes_whichever_tier_has_the_pages() -> None:
    core = cached()
    core = cached(pin_bytes=9 * core.geometry.page_bytes)
    core.evict_device(16)
    for other in OTHERS[:2]:
        core.compute(other)
    core.settle()
    assert pin(core, PROMPT).figures["pages"] == 4  # in host memory
    assert pin(core, OTHERS[0]).figures["pages"] == 4  # on the device
    assert "8 pages are pinned, 4 more go beyond 9, cache.pin_bytes" in pin(core, OTHERS[1]).refusal
    core.compute(PROMPT)
    assert core.core.admin.pins.pages == 8
    unpin(core, 1)
    unpin(core, 2)
    core.nothing_left()


def test_a_request_that_needs_all_of_the_memory_ends_a_pin() -> None:
    core = cached()
    pin(core, PROMPT)
    request = core.submit(range(500, 531))  # 16 pages with its answer
    core.settle()
    assert core.ended[request].reason == "length"
    assert core.core.state.counters["pins_gave_way"] == 1
    core.nothing_left()


def test_a_pinned_prefix_in_host_memory_is_loaded_back_and_stays() -> None:
    core = cached()
    core.evict_device(16)
    assert pin(core, PROMPT).figures["pages"] == 4
    core.evict_host(24)
    assert core.match(PROMPT).host_pages == 4
    core.compute(PROMPT)
    core.settle()
    assert core.match(PROMPT).device_pages == 4
    unpin(core, 1)
    core.nothing_left()


@pytest.mark.parametrize("lost", ["worker", "storage", "both"])
def test_a_pin_outlives_what_it_pins_without_harm(lost: str) -> None:
    core = cached()
    pin(core, PROMPT)
    if lost in ("worker", "both"):
        core.restart_worker()
    if lost in ("storage", "both"):
        core.restart_storage()
    core.compute(PROMPT)
    core.settle()
    assert unpin(core, 1) == ""
    core.nothing_left()


def test_what_a_pin_has_lost_does_not_count_against_new_ones() -> None:
    core = cached()
    pin(core, PROMPT)
    core.restart_worker()
    core.restart_storage()
    core.compute(OTHERS[0])
    core.settle()
    assert pin(core, OTHERS[0]).refusal == ""
    assert status(core.core)["pins"] == {"count": 2, "pages": 4}
    assert (unpin(core, 1), unpin(core, 2)) == ("", "")
    core.nothing_left()


def test_a_pin_keeps_no_device_page_that_the_tree_has_lost() -> None:
    core = cached()
    pin(core, PROMPT, ttl_s=60.0)
    (node,) = core.nodes()
    core.core.host.release(core.core.state.tree.detach(node).host)  # as after a bad load
    core.wait(1.0)
    core.feed(DeadlineReached())
    core.settle()
    assert core.core.state.device.available == core.core.state.device.total
    assert unpin(core, 1) == ""
    core.nothing_left()


def test_a_drain_ends_the_pins_of_what_only_that_storage_has_and_a_flush_keeps_pins() -> None:
    core = cached()
    pin(core, PROMPT)
    core.answer(core.gateway, Administer(1, "flush"))
    assert core.take(Administered).figures["kept_pages"] == 8
    core.core.device.evict(0)
    core.answer(core.gateway, Administer(1, "drain", "storage-0"))
    assert core.take(Administered).figures == {"host_pages": 0}
    assert len(core.core.admin.pins) == 1  # the device has it
    core.settle()
    unpin(core, 1)
    core.nothing_left()


def test_a_pinned_page_isn_t_locked_for_the_status() -> None:
    core = cached()
    pin(core, PROMPT)
    told = status(core.core)
    assert (told["locked"], told["pins"]) == (0, {"count": 1, "pages": 4})
    core.submit(PROMPT)
    assert status(core.core)["locked"] > 0
