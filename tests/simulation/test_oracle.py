"""Attention in the simulation notices a wrong page. That faults of the core are noticed: tests/mutants."""

import pytest

from kvtide.simulation.content import EMPTY, attend, checksum, follow, next_token, root, walk
from shared.page_hash import namespace_seed


def test_attention_over_the_right_pages_gives_the_sequence_s_own_hash() -> None:
    slots = walk(0, [3, 1, 4, 1, 5])
    assert attend(0, slots) == slots[-1][1]
    assert next_token(slots[-1][1]) == next_token(follow(slots[-2][1], 5))


@pytest.mark.parametrize("at", range(5))
def test_attention_over_a_wrong_slot_spoils_every_later_token(at: int) -> None:
    slots = walk(0, [3, 1, 4, 1, 5])
    spoilt = [*slots[:at], EMPTY, *slots[at + 1 :]]
    assert attend(0, spoilt) != slots[-1][1]
    other = walk(0, [3, 1, 9, 1, 5])
    swapped = [*slots[:at], other[at], *slots[at + 1 :]]
    assert attend(0, swapped) == slots[-1][1] or at >= 2


def test_equal_tokens_in_two_namespaces_have_different_pages() -> None:
    roots = {root(namespace_seed(*names)) for names in [("", "", ""), ("a", "bc", ""), ("ab", "c", "")]}
    assert len(roots) == 3
    assert len({checksum([tuple(walk(each, [1, 2]))]) for each in roots}) == 3
