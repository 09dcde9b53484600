"""POLICY-03 on live traffic: what the tiers gave of late beside the optimum, from a sample."""

import random
from collections import OrderedDict

import numpy as np
import pytest

from kvtide.replay.optimum import Bounds
from services.scheduler.core import regret
from services.scheduler.core.regret import EVERY, WINDOW, Regret, Window
from shared.packed import pack

NO_SEED = b""
END = [0]  # a prompt's last token is never cached


def conversations(seed: int, requests: int, users: int = 60, turns: int = 8) -> list[list[int]]:
    """Prompts, a token for each page: users talk in turn, each prompt holds the ones before, and end some day."""
    rng, paths = random.Random(seed), []
    talks: list[list[int]] = [[] for _ in range(users)]
    for number in range(requests):
        user = min(rng.randrange(users), rng.randrange(users))  # some talk more than others
        if len(talks[user]) > turns:
            talks[user] = [rng.randrange(5)]
        talks[user] = talks[user] + [10 * number + at for at in range(rng.randint(1, 3))]
        paths.append(talks[user])
    return paths


def lru_hits(paths: list[list[int]], capacity: int) -> list[int]:
    """Leading pages that a cache which drops the longest unused leaf has of each path."""
    cache: OrderedDict[tuple[int, ...], None] = OrderedDict()
    hits = []
    for path in paths:
        prefixes = [tuple(path[: n + 1]) for n in range(len(path))]
        hits.append(next((n for n, prefix in enumerate(prefixes) if prefix not in cache), len(path)))
        for prefix in reversed(prefixes):  # the deepest is the oldest of them
            cache[prefix] = None
            cache.move_to_end(prefix)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hits


def compared(paths: list[list[int]], hits: list[int], capacity: int) -> Regret:
    window = Window(page_size=1)
    for path, found in zip(paths, hits, strict=True):
        window.observe(NO_SEED, pack(path + END), found)
    told = window.compare(capacity)
    assert told is not None
    return told


def exact(paths: list[list[int]], capacity: int) -> float:
    """The optimum's hit rate over the second half, by the replay's own bounds."""
    best = Bounds([np.array(path, np.int64) for path in paths]).optimum(capacity)
    half = len(paths) // 2
    return sum(best[half:]) / sum(len(path) + 1 for path in paths[half:])


@pytest.mark.parametrize("capacity", [20, 60, 200])
def test_regret_is_exact_while_every_page_is_sampled(capacity: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regret, "MAX_SAMPLES", 10**6)
    paths = conversations(1, 600)
    hits = lru_hits(paths, capacity)
    told = compared(paths, hits, capacity)
    assert told.requests == 300
    assert told.hit_rate == round(sum(hits[300:]) / sum(len(path) + 1 for path in paths[300:]), 4)
    assert told.optimal_hit_rate == round(exact(paths, capacity), 4)
    assert told.hit_rate < told.optimal_hit_rate


@pytest.mark.parametrize("seed", range(3))
def test_regret_from_a_sample_is_near(seed: int) -> None:
    paths = [[each * 8 + at for each in path for at in range(8)] for path in conversations(seed, WINDOW)]
    told = compared(paths, lru_hits(paths, 800), 800)
    assert told.optimal_hit_rate == pytest.approx(exact(paths, 800), abs=0.03)


def test_regret_keeps_a_bounded_window_and_sample() -> None:
    window = Window(page_size=1)
    for path in conversations(2, 3 * WINDOW, turns=60):
        window.observe(NO_SEED, pack(path + END), 0)
        assert window.samples <= regret.MAX_SAMPLES
    assert len(window) == WINDOW
    thin = window.sample
    assert thin > 1
    for number in range(3 * WINDOW):
        window.observe(NO_SEED, pack([number, *END]), 0)
    assert window.sample < thin  # short prompts: more of their pages


def test_regret_gives_the_optimum_what_the_tiers_had_from_before_the_window() -> None:
    paths = [[10 * number, 10 * number + 1] for number in range(2 * EVERY)]
    told = compared(paths, [2] * len(paths), 2)
    assert (told.hit_rate, told.optimal_hit_rate) == (0.6667, 0.6667)


def test_regret_is_asked_for_anew_after_some_requests_only() -> None:
    window = Window(page_size=1)
    for number in range(EVERY - 1):
        window.observe(NO_SEED, pack([number % 3, *END]), 0)
    assert window.compare(3) is None
    window.observe(NO_SEED, pack([1, *END]), 0)
    first = window.compare(3)
    assert first is not None
    window.observe(NO_SEED, pack([1, *END]), 1)
    assert window.compare(3) is first


def test_regret_of_prompts_without_a_whole_page_is_none() -> None:
    window = Window(page_size=64)
    for _ in range(EVERY):
        window.observe(NO_SEED, pack([1, 2, 3]), 0)
    assert window.compare(3) is None
