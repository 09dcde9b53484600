"""The set of evictable leaves: order, moves, and cost."""

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.leaves import LeafHeap


def _heap() -> LeafHeap[Any]:
    return LeafHeap("entry", lambda node: (0, node.last_access), lambda node: node.evictable)


def _leaf(last_access: int) -> Any:
    return SimpleNamespace(last_access=last_access, evictable=True, entry=None)


def test_the_least_recently_used_comes_first() -> None:
    heap, leaves = _heap(), [_leaf(at) for at in (3, 1, 2)]
    for leaf in leaves:
        heap.offer(leaf)
    assert [heap.pop().last_access for _ in range(3)] == [1, 2, 3]  # type: ignore[union-attr]
    assert heap.pop() is None


def test_an_access_after_the_offer_counts() -> None:
    heap, old, new = _heap(), _leaf(1), _leaf(2)
    heap.offer(old)
    heap.offer(new)
    old.last_access = 3
    assert heap.pop() is new
    assert heap.pop() is old


def test_what_is_no_candidate_any_more_is_passed_over() -> None:
    heap, leaf = _heap(), _leaf(1)
    heap.offer(leaf)
    leaf.evictable = False
    assert heap.pop() is None
    leaf.evictable = True
    heap.offer(leaf)
    assert heap.pop() is leaf


def test_a_parked_leaf_comes_back_when_it_is_unparked() -> None:
    heap, leaf = _heap(), _leaf(1)
    heap.offer(leaf)
    node = heap.pop()
    assert node is not None
    heap.park(node)
    assert heap.pop() is None
    heap.unpark()
    assert heap.pop() is leaf


def test_the_heap_stays_bounded_when_leaves_come_and_go() -> None:
    heap, leaves = _heap(), [_leaf(at) for at in range(10)]
    for _ in range(1000):
        for leaf in leaves:
            heap.offer(leaf)
        for leaf in leaves:
            heap.discard(leaf)
    assert len(heap._heap) < 300


@given(
    st.lists(st.tuples(st.sampled_from(["offer", "touch", "discard", "flip", "pop"]), st.integers(0, 5)), max_size=60)
)
def test_it_behaves_like_a_sorted_list(actions: list[tuple[str, int]]) -> None:
    heap, leaves, model, clock = _heap(), [_leaf(at) for at in range(6)], set[int](), 10
    for action, number in actions:
        leaf = leaves[number]
        match action:
            case "offer":
                heap.offer(leaf)
                if leaf.evictable:
                    model.add(number)
            case "touch":
                clock += 1
                leaf.last_access = clock
            case "discard":
                heap.discard(leaf)
                model.discard(number)
            case "flip":
                leaf.evictable = not leaf.evictable
                if not leaf.evictable:  # its owner takes it out
                    heap.discard(leaf)
                    model.discard(number)
            case "pop":
                popped = heap.pop()
                expected = min(model, key=lambda each: leaves[each].last_access, default=None)
                assert popped is (None if expected is None else leaves[expected])
                model.discard(-1 if expected is None else expected)
        assert {at for at, leaf in enumerate(leaves) if heap.sees(leaf)} == model
        assert heap.entries() == (len(model), 0)
