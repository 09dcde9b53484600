"""POLICY-03: the optimum is the optimum."""

from itertools import combinations

import numpy as np
import pytest

from kvtide.replay.optimum import Bounds
from tests.unit.kvtide.replay.traces import random_paths

Content = frozenset[tuple[int, ...]]  # pages, each named by the ids of its path


def _leading(path: list[int], content: Content) -> int:
    return next((n for n in range(len(path)) if tuple(path[: n + 1]) not in content), len(path))


def _best_by_search(paths: list[list[int]], capacity: int) -> int:
    """Hit pages of the best choice among all: after each request any closed part of cache and request may stay."""
    states: dict[Content, int] = {frozenset(): 0}
    for path in paths:
        following: dict[Content, int] = {}
        for content, hits in states.items():
            score = hits + _leading(path, content)
            pages = content | {tuple(path[: n + 1]) for n in range(len(path))}
            for size in range(min(capacity, len(pages)) + 1):
                for kept in map(frozenset, combinations(sorted(pages), size)):
                    if all(len(page) == 1 or page[:-1] in kept for page in kept):
                        following[kept] = max(following.get(kept, 0), score)
        states = following
    return max(states.values())


@pytest.mark.parametrize("seed", range(12))
def test_policy_03_no_choice_of_what_to_keep_gives_more(seed: int) -> None:
    paths = random_paths(seed, requests=7, ids=2, longest=4)
    bounds = Bounds([np.array(path, np.int64) for path in paths])
    for capacity in (1, 2, 3, 5):
        assert sum(bounds.optimum(capacity)) == _best_by_search(paths, capacity)


@pytest.mark.parametrize("seed", range(5))
def test_policy_03_an_infinite_cache_has_what_was_seen(seed: int) -> None:
    paths = random_paths(seed, requests=60)
    bounds = Bounds([np.array(path, np.int64) for path in paths])
    seen: set[tuple[int, ...]] = set()
    for path, infinite in zip(paths, bounds.infinite, strict=True):
        assert infinite == _leading(path, frozenset(seen))
        seen |= {tuple(path[: n + 1]) for n in range(len(path))}
    assert bounds.unique_pages == len(seen)
    assert bounds.optimum(len(seen)) == bounds.infinite
    assert sum(bounds.optimum(5)) < sum(bounds.infinite)
