"""The simulation notices what it is there for: wrong pages, leaks, and core errors."""

from typing import Any

import pytest

from kvtide.simulation.content import EMPTY, attend, checksum, follow, next_token, root, walk
from kvtide.simulation.run import run_seed
from services.scheduler.core.load_back import LoadBack
from services.scheduler.core.operations import Load
from shared.page_hash import namespace_seed


def test_attention_over_the_right_pages_gives_the_sequence_s_own_hash() -> None:
    slots = walk(0, [3, 1, 4, 1, 5])
    assert attend(0, slots) == slots[-1].after
    assert next_token(slots[-1].after) == next_token(follow(slots[-2].after, 5))


@pytest.mark.parametrize("at", range(5))
def test_attention_over_a_wrong_slot_spoils_every_later_token(at: int) -> None:
    slots = walk(0, [3, 1, 4, 1, 5])
    spoilt = [*slots[:at], EMPTY, *slots[at + 1 :]]
    assert attend(0, spoilt) != slots[-1].after
    other = walk(0, [3, 1, 9, 1, 5])
    swapped = [*slots[:at], other[at], *slots[at + 1 :]]
    assert attend(0, swapped) == slots[-1].after or at >= 2


def test_equal_tokens_in_two_namespaces_have_different_pages() -> None:
    roots = {root(namespace_seed(*names)) for names in [("", "", ""), ("a", "bc", ""), ("ab", "c", "")]}
    assert len(roots) == 3
    assert len({checksum([tuple(walk(each, [1, 2]))]) for each in roots}) == 3


def _fails_within(seeds: range) -> bool:
    return any(run_seed(seed).failure for seed in seeds)


def test_it_sees_pages_matched_while_they_are_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.scheduler.core.admission._loads", lambda path: set())
    assert _fails_within(range(200))


def test_it_sees_a_load_that_is_settled_before_its_ack(monkeypatch: pytest.MonkeyPatch) -> None:
    start = LoadBack.start

    def start_and_unpin(self: LoadBack, nodes: list[Any], pages: Any) -> None:
        start(self, nodes, pages)
        for operation in self._state.operations.table.values():
            if isinstance(operation, Load) and operation.pool is not None:
                operation.pool.unpin(operation.host_pages)

    monkeypatch.setattr(LoadBack, "start", start_and_unpin)
    assert _fails_within(range(200))
