"""The behaviours that kvtide claims: each has a test that carries its id, so that the list of tests is what works."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
CLAIMED = [
    *(f"TREE-{number:02}" for number in range(1, 11)),
    "ALLOC-01",
    "ALLOC-02",
    *(f"TIER-{number:02}" for number in range(1, 12)),
    "STORE-05",
    "STORE-06",
    *(f"SC-{number:02}" for number in (*range(1, 24), *range(25, 33))),
]


def _named() -> set[str]:
    """Ids in the names of all tests: test_tier_05_and_09_... carries two."""
    found: set[str] = set()
    for path in TESTS.rglob("test_*.py"):
        for prefix, numbers in re.findall(
            r"def test_([a-z]+)_(\d\d(?:_(?:and_)?\d\d)*)_", path.read_text(encoding="utf-8")
        ):
            found.update(f"{prefix.upper()}-{number}" for number in re.findall(r"\d\d", numbers))
    return found


@pytest.mark.parametrize("behaviour", CLAIMED)
def test_every_claimed_behaviour_has_a_test(behaviour: str) -> None:
    assert behaviour in _named()
