"""The statistics behind `kvtide bench tenants`."""

import random

import pytest

from kvtide.bench.tenants import LEAST_P, mann_whitney

EIGHT = [12.1, 9.8, 11.4, 10.7, 13.0, 9.9, 10.2, 12.8]


@pytest.mark.parametrize(
    ("first", "second", "p"),
    [
        ([1, 2, 3, 4, 5], [6, 7, 8, 9, 10], 0.012185780355344),  # U 0, mean 12.5, variance 25 * 11 / 12
        ([1, 1, 2, 3, 3], [2, 3, 3, 4, 5], 0.103741678236542),  # U 4.5, ties 6 + 6 + 60, variance 21.25
        (EIGHT, EIGHT, 1.0),
    ],
)
def test_mann_whitney(first: list[float], second: list[float], p: float) -> None:
    assert mann_whitney(first, second) == pytest.approx(p, rel=1e-6)
    assert mann_whitney(second, first) == pytest.approx(p, rel=1e-6)


def test_it_tells_a_shift_and_nothing_where_there_is_none() -> None:
    chance = random.Random(1)
    first, second = ([chance.gauss(100, 10) for _ in range(100)] for _ in range(2))
    assert mann_whitney(first, second) > LEAST_P
    assert mann_whitney(first, [value - 10 for value in second]) < LEAST_P
