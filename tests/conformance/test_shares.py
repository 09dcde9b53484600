"""A namespace's share of a tier: who holds more gives first, and only when pages are short."""

from typing import get_args

import pytest

from services.scheduler.core.settings import Eviction
from services.scheduler.core.tree import Match
from shared.messages.gateway import Namespace
from tests.conformance.harness import Harness

QUIET, LOUD = Namespace("quiet"), Namespace("loud")
PROMPT = [1, 2, 3, 4, 5]  # two pages


def flooded(**settings: object) -> tuple[Harness, Match]:
    """Twelve device pages, two of them a quiet tenant's, after a loud one has asked for 48: what is left of the two."""
    core = Harness(**{"device": 12, "host": 0, **settings})
    core.compute(PROMPT, namespace=QUIET)
    for number in range(100, 100 + 10 * 24, 10):
        core.compute(range(number, number + 5), namespace=LOUD)
    return core, core.match(PROMPT, QUIET)


@pytest.mark.parametrize("eviction", get_args(Eviction))
def test_share_a_namespace_within_its_share_outlives_one_above_it(eviction: str) -> None:
    core, left = flooded(eviction=eviction, namespace_share=0.5)
    assert left.device_pages == 2
    core.nothing_left()


def test_share_of_everything_protects_nobody() -> None:
    assert flooded()[1].device_pages == 0


def test_share_holds_in_host_memory_too() -> None:
    _, left = flooded(host=12, backend=False, namespace_share=0.5)
    assert (left.end.pages, left.end.backuped) == (2, True)
    _, left = flooded(host=12, backend=False)
    assert left.end.is_root


def test_share_takes_nothing_while_there_is_room() -> None:
    core = Harness(device=12, host=0, namespace_share=0.25)
    for number in range(100, 140, 10):
        core.compute(range(number, number + 5), namespace=LOUD)
    assert core.core.state.tree.evictable == 8


def test_share_when_nobody_is_above_it_the_strategy_decides() -> None:
    core = Harness(device=12, host=0, namespace_share=0.5)
    tenants = [Namespace(f"t{number}") for number in range(4)]
    for tenant in tenants:
        core.compute(PROMPT, namespace=tenant)
    core.evict_device(4)
    assert [core.match(PROMPT, tenant).device_pages for tenant in tenants] == [0, 0, 2, 2]


def test_share_is_of_the_new_device_after_a_worker_s_restart() -> None:
    core, _ = flooded(host=24, backend=False, namespace_share=0.5)
    core.restart_worker()
    core.compute(PROMPT, namespace=QUIET)
    for number in range(100, 100 + 10 * 24, 10):
        core.compute(range(number, number + 5), namespace=LOUD)
    assert core.match(PROMPT, QUIET).device_pages == 2
    core.nothing_left()


def test_share_a_namespace_that_has_gone_leaves_nothing_behind() -> None:
    core = Harness(device=12, host=0, namespace_share=0.5)
    for number in range(40):
        core.compute(PROMPT, namespace=Namespace(f"t{number}"))
    assert core.core.state.holdings is not None
    assert all(len(held) <= 6 for held in core.core.state.holdings.pages.values())
