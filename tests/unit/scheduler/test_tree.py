"""The radix tree against a naive model: a dict from prefix to page."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.scheduler.core.events import Medium
from services.scheduler.core.node import HostSpan, Node
from services.scheduler.core.pages import HostPool, PagePool, Pages
from services.scheduler.core.tree import RadixTree
from services.scheduler.core.tree_holds import Lock
from shared.errors import IntegrityError
from shared.packed import pack
from shared.page_hash import chain, namespace_seed

SIZE = 2  # tokens in a page
TOTAL = 24  # device pages


def _tree() -> RadixTree:
    return RadixTree(SIZE, lambda node: (0, node.last_access))


def _pages(*pages: int) -> Pages:
    return np.array(pages, np.int32)


def test_a_split_keeps_both_parts_pages_spans_digests_and_locks() -> None:
    tree, pool = _tree(), HostPool("storage-0", 1, 1, 9)
    node = tree.insert(b"", pack([1, 2, 3, 4, 5, 6]), _pages(7, 8, 9), 0).path[0]
    tree.set_host(node, HostSpan(pool, _pages(1, 2, 3)))
    digests = tree.digests(node)
    lock = tree.lock(node)
    upper = tree.match_prefix(b"", pack([1, 2, 9, 9]), 2).end
    assert upper is not node
    assert upper.value is not None
    assert node.value is not None
    assert (upper.value.tolist(), node.value.tolist()) == ([7], [8, 9])
    assert upper.host is not None
    assert node.host is not None
    assert (upper.host.pages.tolist(), node.host.pages.tolist()) == ([1], [2, 3])
    assert tree.digests(upper) + tree.digests(node) == digests == list(chain(b"", pack([1, 2, 3, 4, 5, 6]), SIZE))
    assert (upper.lock_ref, node.lock_ref, tree.protected) == (1, 1, 3)
    tree.unlock(lock)
    assert (upper.lock_ref, node.lock_ref, tree.evictable) == (0, 0, 3)


def test_a_lock_is_released_once() -> None:
    tree = _tree()
    lock = tree.lock(tree.insert(b"", pack([1, 2]), _pages(1), 0).path[0])
    tree.unlock(lock)
    with pytest.raises(IntegrityError, match="released twice"):
        tree.unlock(lock)


def test_namespaces_with_equal_joined_fields_are_different() -> None:
    tree = _tree()
    first, second = namespace_seed("a", "bc", ""), namespace_seed("ab", "c", "")
    tree.insert(first, pack([1, 2]), _pages(1), 0)
    assert tree.match_prefix(second, pack([1, 2]), 1).device == []
    assert tree.match_prefix(first, pack([1, 2]), 1).device_pages == 1


def test_the_root_of_an_empty_namespace_goes() -> None:
    tree = _tree()
    node = tree.insert(b"x", pack([1, 2]), _pages(1), 0).path[0]
    tree.detach(node)
    assert tree.roots == {}


def test_locked_pages_of_a_removed_node_come_back_with_its_last_lock() -> None:
    tree = _tree()
    node = tree.insert(b"", pack([1, 2]), _pages(5), 0).path[0]
    locks = [tree.lock(node), tree.lock(node)]
    assert tree.detach(node).device.tolist() == []
    assert tree.unlock(locks[0]).tolist() == []
    assert tree.unlock(locks[1]).tolist() == [5]
    assert (tree.evictable, tree.protected, tree.detached) == (0, 0, set())


class Told:
    """A publisher that remembers what it is told."""

    def __init__(self) -> None:
        self.gone: list[bytes] = []

    def stored(self, node: Node, medium: Medium) -> None:
        pass

    def removed(self, node: Node, medium: Medium, first: int = 0) -> None:
        self.gone += RadixTree.digests_of(node)[first:]


def test_tier_04_a_leaf_gives_up_its_last_pages_and_stays_a_leaf() -> None:
    told = Told()
    tree = RadixTree(SIZE, lambda node: (0, node.last_access), told)
    node = tree.insert(b"", pack([1, 2, 3, 4, 5, 6]), _pages(1, 2, 3), 0).path[0]
    digests = list(tree.digests(node))
    assert tree.device_leaves.pop() is node
    assert tree.evict_end(node, 2).device.tolist() == [2, 3]
    assert (node.pages, node.key, tree.evictable, told.gone) == (1, pack([1, 2]), 1, digests[1:])
    assert tree.match_prefix(b"", pack([1, 2, 3, 4]), 2).device_pages == 1
    assert tree.device_leaves.pop() is node
    assert tree.evict_end(node, 2).device.tolist() == [1]
    assert (node.detached, tree.evictable, tree.roots, told.gone) == (True, 0, {}, [*digests[1:], digests[0]])


TOKENS = st.lists(st.integers(1, 2), min_size=SIZE, max_size=5 * SIZE).map(
    lambda tokens: tokens[: len(tokens) // SIZE * SIZE]
)


class TreeMachine(RuleBasedStateMachine):
    """Inserts, matches, locks and evictions; the model knows the page of every cached prefix."""

    def __init__(self) -> None:
        super().__init__()
        self.tree, self.pool = _tree(), PagePool(1, TOTAL)
        self.model: dict[tuple[int, ...], int] = {}
        self.locks: list[tuple[Lock, tuple[int, ...]]] = []

    def _known(self, tokens: list[int]) -> list[int]:
        pages = [self.model.get(tuple(tokens[: end + SIZE])) for end in range(0, len(tokens), SIZE)]
        return pages[: pages.index(None)] if None in pages else pages  # type: ignore[return-value]

    @rule(tokens=TOKENS)
    def insert(self, tokens: list[int]) -> None:
        pages = self.pool.alloc(len(tokens) // SIZE)
        if pages is None:
            return
        known = self._known(tokens)
        result = self.tree.insert(b"", pack(tokens), pages, 0)
        assert result.present == len(known)
        assert sorted(result.duplicates.tolist()) == sorted(pages[: len(known)].tolist())
        self.pool.free(result.duplicates)
        for at in range(len(known), len(pages)):
            self.model[tuple(tokens[: (at + 1) * SIZE])] = int(pages[at])

    @rule(tokens=TOKENS)
    def match(self, tokens: list[int]) -> None:
        match = self.tree.match_prefix(b"", pack(tokens), len(tokens) // SIZE)
        assert [page for node in match.device if node.value is not None for page in node.value] == self._known(tokens)

    @rule(tokens=TOKENS)
    def lock(self, tokens: list[int]) -> None:
        match = self.tree.match_prefix(b"", pack(tokens), len(tokens) // SIZE)
        self.locks.append((self.tree.lock(match.end), tuple(tokens[: match.device_pages * SIZE])))

    @rule(number=st.integers(0, 9))
    def unlock(self, number: int) -> None:
        if self.locks:
            lock, _ = self.locks.pop(number % len(self.locks))
            self.pool.free(self.tree.unlock(lock))

    @rule(count=st.integers(1, 4))
    def evict(self, count: int) -> None:
        node = self.tree.device_leaves.pop()
        assert (node is None) == (self.tree.evictable == 0)
        if node is not None:
            wanted = min(count, node.pages)
            freed = self.tree.evict_end(node, count).device
            assert len(freed) == wanted
            self.pool.free(freed)
            self.model = {key: page for key, page in self.model.items() if page not in freed}

    @invariant()
    def counts_are_right(self) -> None:
        protected = {key[: end + SIZE] for _, key in self.locks for end in range(0, len(key), SIZE)}
        assert protected <= self.model.keys()
        assert self.tree.protected == len(protected)
        assert self.tree.evictable == len(self.model) - len(protected)
        assert self.pool.available == TOTAL - len(self.model)


TreeMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestTree = TreeMachine.TestCase
