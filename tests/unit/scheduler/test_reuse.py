"""What `auto` learns: prefix identities, frequencies, hazard rates, shadows."""

import numpy as np

from services.scheduler.core.frequency import MOST, Frequencies, prefix_hashes
from services.scheduler.core.hazard import HISTORY, Hazard
from services.scheduler.core.reuse import FIT_EVERY, MARGIN, SAMPLE, SHADOW_PAGES, Ranking, Reuse, oldest
from services.scheduler.core.shadow import Shadow
from shared.packed import pack


def test_a_prefix_hash_stands_for_the_page_and_all_before_it() -> None:
    one = prefix_hashes(b"s", pack([1, 2, 3, 4, 5, 6, 7]), 2)
    assert len(one) == 3
    assert one.tolist() == prefix_hashes(b"s", pack([1, 2, 3, 4, 5, 6]), 2).tolist()
    other = prefix_hashes(b"s", pack([1, 2, 4, 3, 5, 6]), 2)
    assert one[0] == other[0]
    assert not set(one[1:].tolist()) & set(other[1:].tolist())
    assert not set(one.tolist()) & set(prefix_hashes(b"t", pack([1, 2, 3, 4, 5, 6]), 2).tolist())


def test_prefix_hashes_of_many_pages_differ() -> None:
    hashes = np.concatenate([prefix_hashes(b"", pack([first, *range(2000)]), 1) for first in range(50)])
    assert len(np.unique(hashes)) == len(hashes)
    assert len(np.unique(hashes[hashes % np.uint64(SAMPLE) == 0])) > len(hashes) / SAMPLE * 0.9


def test_frequencies_count_saturate_and_fade() -> None:
    counts, pages = Frequencies(width=1024), np.array([3, 2**40 + 5], np.uint64)
    assert counts.add(pages).tolist() == [1, 1]
    assert counts.add(pages[:1]).tolist() == [2]
    for _ in range(300):
        highest = counts.add(pages[:1])[0]
    assert highest == MOST
    for number in range(5000):
        counts.add(np.array([number * 2**33 + number], np.uint64))
    assert counts.add(pages[:1])[0] < MOST


def test_a_rate_is_uses_over_the_time_that_pages_spent_at_an_age() -> None:
    hazard, often, once = Hazard(), np.array([1]), np.array([0])
    for clock in range(0, 4000, 5):
        hazard.used([7], often, clock)  # again after 5 ticks, always
        hazard.used([10_000 + clock], once, clock)  # never again
    hazard.observe(4000)
    rates = hazard.rates(horizon=1)
    assert 0.3 < rates[1][1] < 0.6  # one use in the 2 ticks that it spends at this age
    assert rates[0][1] < 0.01
    assert rates[7][1] < rates[1][1]  # nothing seen: the mean of all


def test_time_without_a_use_is_evidence_before_the_use() -> None:
    hazard = Hazard()
    hazard.used([7], np.array([0]), 0)
    hazard.observe(100)
    low = hazard.rates(10)[0][3]
    hazard.observe(1000)
    assert hazard.rates(10)[0][9] < low


def test_the_history_is_bounded() -> None:
    hazard = Hazard()
    for start in range(0, 3 * HISTORY, 1024):
        hazard.used(list(range(start, start + 1024)), np.zeros(1024, np.int64), start)
    assert len(hazard._slots) == HISTORY


def test_a_shadow_counts_leading_hits_only() -> None:
    shadow = Shadow(2, oldest)
    shadow.use([1, 2], [0, 0], 1)
    shadow.use([3], [0], 2)  # takes the place of 2, the older leaf; 1 is older still, but 2 is below it
    shadow.use([1, 2], [0, 0], 3)
    assert shadow.hits == 1
    shadow.use([1, 2], [0, 0], 4)
    assert shadow.hits == 3


def test_a_shadow_takes_what_fits_of_a_long_path() -> None:
    shadow = Shadow(2, oldest)
    shadow.use([1, 2, 3], [0, 0, 0], 1)
    shadow.use([1, 2, 3], [0, 0, 0], 2)
    assert shadow.hits == 2


def test_a_large_tier_is_sampled_more_thinly() -> None:
    assert Ranking(SAMPLE * SHADOW_PAGES, Hazard())._sample == SAMPLE
    assert Ranking(SAMPLE * SHADOW_PAGES + 1, Hazard())._sample == 2 * SAMPLE


def test_policy_02_the_choice_whose_shadow_hits_most_is_followed() -> None:
    reuse, clock = Reuse(page_size=1), 0
    reuse.resize_device(400)

    def request(first: int, pages: int) -> None:
        nonlocal clock
        clock += 1
        reuse.observe(b"", pack(range(first, first + pages)), clock)

    for number in range(10 * FIT_EVERY):  # 60 hot pages come round between scans of 900 pages that nobody reads again
        request(1_000_000 * (number % 6), 10)
        request(1_000 * (number + 1_000), 150)
    assert reuse.device.follows == "hazard"
    for number in range(20 * FIT_EVERY):  # what came a moment ago comes again, twice, and never more
        request(1_000 * (number // 3 * 7 + 900_000), 50)
    followed = _hits(reuse, reuse.device.follows)
    assert (1 + MARGIN) * followed >= max(_hits(reuse, "lru"), _hits(reuse, "hazard")) > 0


def _hits(reuse: Reuse, name: str) -> float:
    return reuse.device._shadows[name].hits
