"""The arithmetic of `kvtide bench scale`: hit rates, and how long they were low after a change."""

import pytest

from kvtide.bench.scale_figures import STEP_S, WINDOW_S, low_s, rates
from kvtide.bench.scale_load import Asked

CHANGED_S, END_S = 100.0, 200.0


def answered(misses_from_s: float, misses_to_s: float) -> list[Asked]:
    """One request of 10 tokens a second; 8 of them hit in host memory, none between two times."""
    spans = [(at_s, misses_from_s <= at_s < misses_to_s) for at_s in map(float, range(int(END_S)))]
    return [Asked(at_s, 10, 0, 0 if missed else 8, 0) for at_s, missed in spans]


def test_rates_are_hit_tokens_by_prompt_tokens_of_a_span() -> None:
    asked = [Asked(1.0, 100, 10, 20, 30), Asked(2.0, 300, 30, 0, 0), Asked(3.0, 100, 100, 0, 0)]
    found = rates(asked, 0.0, 2.0)
    assert tuple(found) == pytest.approx((0.1, 0.05, 0.075))
    assert found.total == pytest.approx(0.225)
    assert rates(asked, 3.0, 9.0).total == 0.0


def test_a_rate_that_stays_was_never_low() -> None:
    assert low_s(answered(0.0, 0.0), CHANGED_S, END_S, before=0.8) == 0.0


def test_low_until_the_last_window_with_too_many_misses_has_passed() -> None:
    low = low_s(answered(110.0, 120.0), CHANGED_S, END_S, before=0.8)
    assert 20.0 + WINDOW_S - 2 * STEP_S <= low <= 20.0 + WINDOW_S


def test_a_rate_that_falls_for_good_is_low_until_the_end() -> None:
    assert low_s(answered(110.0, END_S), CHANGED_S, END_S, before=0.8) == END_S - CHANGED_S
