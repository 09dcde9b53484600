"""TIER-12: a copy is made when it was measured to bring the first token sooner than computing the same."""

import pytest

from services.scheduler.core.speeds import TRY_AFTER
from shared.messages.storage import FindPages, PrefetchPages
from shared.messages.worker import LoadPages
from tests.conformance.harness import STEP_S, Harness
from tests.conformance.test_why import reasons, tiers

A = list(range(1, 9))  # four pages of two tokens
PROMPT = [*A, 9]
TAIL = list(range(20, 29))
OTHER = list(range(40, 49))


def loads(core: Harness, tokens: list[int]) -> bool:
    """Is what host memory has of the tokens loaded?"""
    core.evict_device(12)
    core.submit(tokens)
    core.settle(LoadPages)
    loading = bool(core.pending(LoadPages))
    core.settle()
    return loading


def measured(load_s: float, policy: str = "auto") -> Harness:
    """A core that has seen nine tokens computed in STEP_S, and four pages loaded in `load_s`."""
    core = Harness(load_policy=policy, backend=False, load_s=load_s)
    core.compute(PROMPT)
    assert loads(core, PROMPT)
    return core


@pytest.mark.parametrize(("load_s", "loaded"), [(0.9 * STEP_S, True), (1.1 * STEP_S, False)])
def test_tier_12_the_faster_of_load_and_recompute_is_taken(load_s: float, loaded: bool) -> None:
    assert loads(measured(load_s), PROMPT) is loaded


def test_tier_12_the_prefill_of_what_follows_runs_beside_a_load_and_counts_for_it() -> None:
    core = measured(1.1 * STEP_S)
    assert loads(core, PROMPT + TAIL)  # all of it takes two steps' time


def test_tier_12_without_auto_length_alone_counts() -> None:
    assert loads(measured(100 * STEP_S, "threshold"), PROMPT)


def test_tier_12_a_slow_copy_is_tried_again_and_trusted_when_it_is_fast() -> None:
    core = measured(2 * STEP_S)
    core.load_s = 0.0
    assert [loads(core, PROMPT) for _ in range(TRY_AFTER + 1)] == [False] * TRY_AFTER + [True]
    tries = [loads(core, PROMPT) for _ in range(3 * TRY_AFTER)]
    assert tries[-2:] == [True, True]  # what was slow has faded


@pytest.mark.parametrize(("fetch_s", "fetched"), [(0.1 * STEP_S, True), (1.1 * STEP_S, False)])
def test_tier_12_an_l3_hit_that_would_be_slower_than_recomputing_is_not_taken(fetch_s: float, fetched: bool) -> None:
    core = Harness(load_policy="auto", fetch_s=fetch_s)
    core.compute(TAIL)
    core.submit(PROMPT)
    core.found(4)
    core.prefetch_done(0, 1, 2, 3)
    core.settle()
    core.submit([token + 100 for token in PROMPT])
    assert core.pending(FindPages)
    core.found(4)
    assert bool(core.pending(PrefetchPages)) is fetched
    core.settle()
    core.nothing_left()


def test_why_a_load_that_was_measured_to_be_slower_than_recompute_is_told() -> None:
    core = Harness(load_policy="auto", backend=False, load_s=10.0)
    core.compute(PROMPT)
    core.evict_device(4)
    assert tiers(core, core.compute(PROMPT)) == [(8, "host")]  # nothing was measured before
    core.evict_device(4)
    request = core.compute(PROMPT)
    assert tiers(core, request) == [(8, "computed")]
    assert reasons(core, request)["host"] == ("slower", "load_back")
    assert core.core.state.counters["load_back_dropped_slower"] == 4


def test_why_a_fetch_that_was_measured_to_be_slower_than_recompute_is_told() -> None:
    core = Harness(load_policy="auto", fetch_s=10.0)
    core.compute(range(60, 69))
    for prompt in (PROMPT, OTHER):
        request = core.submit(prompt)
        core.found(4)
        if prompt is PROMPT:
            core.prefetch_done(0, 1, 2, 3)
        core.settle()
    assert tiers(core, request) == [(8, "computed")]
    assert reasons(core, request)["storage"] == ("slower", "prefetch")
    assert core.core.state.counters["prefetch_dropped_slower"] == 4
