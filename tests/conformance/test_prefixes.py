"""The top prefixes of a status: which are shown, and where their parts lie."""

from typing import Any

from services.scheduler.core import prefixes
from services.scheduler.core.regret import EVERY
from services.scheduler.core.status import status
from shared.packed import pack
from shared.page_hash import chain
from tests.conformance.harness import Harness

A = list(range(1, 9))


def shown(core: Harness) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = status(core.core)["prefixes"]
    return found


def test_status_shows_the_prefixes_that_saved_most_and_the_tiers_of_each_part() -> None:
    core = Harness()
    for end in (9, 10, 11):
        core.compute([*A, end])
    core.compute([*A[:4], 50, 51, 52])
    core.compute([*A[:4], 50, 51, 52])
    core.compute(range(60, 69))
    first, *others = shown(core)
    (*_, last) = chain(b"", pack(A), 2)
    assert (first["digest"], first["tokens"], first["uses"]) == (last[:8].hex(), 8, 3)
    assert first["parts"] == [{"tokens": 8, "tiers": ["device", "host", "storage"]}]
    assert [(each["tokens"], each["uses"]) for each in others] == [(6, 2), (8, 1)]
    core.evict_device(2)
    parts = [part for each in shown(core) for part in each["parts"]]
    assert {"tokens": 4, "tiers": ["host", "storage"]} in parts  # the lower part of the first


def test_status_shows_a_bounded_number_of_prefixes_and_no_token() -> None:
    core = Harness(device=40, prefetch=False)
    for start in range(100, 100 + 20 * (prefixes.MAX_PREFIXES + 2), 20):
        core.compute(range(start, start + 3))
    assert len(shown(core)) == prefixes.MAX_PREFIXES
    assert {key for each in shown(core) for key in each} == {"digest", "tokens", "uses", "parts"}


def test_status_tells_what_the_best_cache_of_the_tiers_size_would_have_given() -> None:
    core = Harness(device=6, host=4, backend=False)
    loop = [list(range(start, start + 9)) for start in (100, 200, 300)]  # 12 pages in turn, one after the other
    assert status(core.core)["regret"] is None
    for number in range(2 * EVERY):
        core.compute(loop[number % 3])
    told = status(core.core)["regret"]
    assert told["requests"] == EVERY
    assert told["hit_rate"] < told["optimal_hit_rate"] <= 8 / 9  # ten pages: most of it, and never the last token
    assert status(Harness(explain=False).core)["regret"] is None
