"""A namespace's share of a tier (`cache.namespace_share`): who holds more gives first when pages are short.

Memory that nobody else needs is anybody's: nothing is evicted for a share's sake.
"""

from collections import Counter
from collections.abc import Callable

from services.scheduler.core.events import CPU, GPU, Medium
from services.scheduler.core.leaves import LeafHeap, Order, device_evictable, host_evictable
from services.scheduler.core.node import Node
from services.scheduler.core.pages import HostPool, PagePool

SLOTS: dict[Medium, str] = {GPU: "device_share_entry", CPU: "host_share_entry"}  # a node's place among its namespace's


class Holdings:
    """Pages of each namespace in each tier. One of the tree's publishers."""

    def __init__(self, share: float, device: Callable[[], PagePool]) -> None:
        self.pages: dict[Medium, Counter[bytes]] = {GPU: Counter(), CPU: Counter()}  # by namespace seed
        self._share = share
        self._device = device
        self._pools: list[HostPool] = []
        self._above: dict[Medium, set[bytes]] = {GPU: set(), CPU: set()}  # of them, those above their share

    def add_pool(self, pool: HostPool) -> None:
        """A new host pool; the share is of all together."""
        self._pools = [*(known for known in self._pools if not known.dead), pool]

    def stored(self, node: Node, medium: Medium) -> None:
        """See Publisher."""
        self._change(node, medium, node.pages)

    def removed(self, node: Node, medium: Medium, first: int = 0) -> None:
        """See Publisher."""
        self._change(node, medium, first - node.pages)

    def above(self, medium: Medium) -> list[bytes]:
        """Namespaces above their share, the one with most pages first. They are few: 1 / share at most."""
        held, limit = self.pages[medium], self._limit(medium)
        found = [seed for seed in self._above[medium] if held[seed] > limit]
        return sorted(found, key=lambda seed: (-held[seed], seed))

    def _change(self, node: Node, medium: Medium, pages: int) -> None:
        seed, held = namespace(node), self.pages[medium]
        held[seed] += pages
        if held[seed] > self._limit(medium):
            self._above[medium].add(seed)
        else:
            self._above[medium].discard(seed)
        if not held[seed]:
            del held[seed]

    def _limit(self, medium: Medium) -> float:
        total = self._device().total if medium == GPU else sum(pool.total for pool in self._pools if not pool.dead)
        return self._share * total


class SharedLeaves(LeafHeap[Node]):
    """Evictable leaves in the order of `all_leaves`, but those of namespaces above their share first."""

    def __init__(self, all_leaves: LeafHeap[Node], order: Order, holdings: Holdings, medium: Medium) -> None:
        super().__init__(SLOTS[medium], order, device_evictable if medium == GPU else host_evictable)
        self._all = all_leaves
        self._holdings = holdings
        self._medium: Medium = medium
        self._own: dict[bytes, LeafHeap[Node]] = {}  # by namespace

    def offer(self, node: Node) -> None:
        """See LeafHeap."""
        self._all.offer(node)
        if not self._evictable(node):
            return
        seed = namespace(node)
        if seed not in self._own:
            held = self._holdings.pages[self._medium]
            if len(self._own) > 2 * len(held):
                self._own = {known: leaves for known, leaves in self._own.items() if known in held}
            self._own[seed] = LeafHeap(self._slot, self._order, self._evictable)
        self._own[seed].offer(node)

    def discard(self, node: Node) -> None:
        """See LeafHeap."""
        self._all.discard(node)
        self._discard_own(node)

    def pop(self) -> Node | None:
        """See LeafHeap."""
        for seed in self._holdings.above(self._medium):
            node = self._own[seed].pop() if seed in self._own else None
            if node is not None:
                self._all.discard(node)
                return node
        node = self._all.pop()
        if node is not None:
            self._discard_own(node)
        return node

    def sees(self, node: Node) -> bool:
        """See LeafHeap: has it both entries?"""
        return super().sees(node) and (self._all.sees(node) or node in self._parked)

    def entries(self) -> tuple[int, int]:
        """See LeafHeap."""
        return self._all.entries()[0], sum([leaves.entries()[0] for leaves in self._own.values()])

    def _discard_own(self, node: Node) -> None:
        own = self._own.get(namespace(node))
        if own is not None:
            own.discard(node)


def namespace(node: Node) -> bytes:
    """Its seed."""
    while node.parent is not None:
        node = node.parent
    return node.seed
