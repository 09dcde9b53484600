"""The set of evictable leaves, kept in order of eviction (TREE-08).

An entry is pushed when a node becomes a candidate and checked again when it is popped, so that an access costs
nothing here. A node has at most one valid entry: the one that it carries. Entries that come in order, as nearly all
of LRU's do, wait in a queue and the others in a heap: sifting through a heap of a tree's every leaf misses the cache
at each level.
"""

import heapq
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from services.scheduler.core.node import Node

MIN_STALE = 16  # stale entries that are not worth a rebuild

Leaf = TypeVar("Leaf")  # a Node, or a page of a shadow
Key = tuple[int, ...]
Order = Callable[["Node"], Key]


def device_evictable(node: "Node") -> bool:
    """An evictable leaf: a value, no lock, no child with a value (TREE-08)."""
    return node.value is not None and not node.lock_ref and not node.valued_children  # a root has no value


def host_evictable(node: "Node") -> bool:
    """A host leaf whose loss leaves no locked node without pages (TIER-05)."""
    return node.host is not None and not node.backed_children and (node.value is not None or not node.lock_ref)


class Entry(NamedTuple):
    """A node's place in the heap."""

    key: Key
    number: int  # breaks ties by age, so that nodes are never compared
    node: Any


class LeafHeap(Generic[Leaf]):
    """Candidates of one tier; `slot` names the node's attribute that carries its valid entry."""

    def __init__(self, slot: str, order: Callable[[Leaf], Key], evictable: Callable[[Leaf], bool]) -> None:
        self._slot = slot
        self._order = order
        self._evictable = evictable
        self._queue: deque[Entry] = deque()  # in order
        self._heap: list[Entry] = []
        self._number = 0
        self._stale = 0
        self._parked: list[Leaf] = []

    def offer(self, node: Leaf) -> None:
        """Add the node if it is evictable. One that is in already moves only when its key became smaller."""
        if not self._evictable(node):
            return
        key = self._order(node)
        entry: Entry | None = getattr(node, self._slot)
        if entry is not None:
            if entry.key <= key:
                return
            self._stale += 1
        self._number += 1
        entry = Entry(key, self._number, node)
        setattr(node, self._slot, entry)
        if not self._queue or self._queue[-1] < entry:
            self._queue.append(entry)
        else:
            heapq.heappush(self._heap, entry)

    def discard(self, node: Leaf) -> None:
        """Forget the node's entry."""
        if getattr(node, self._slot) is None:
            return
        setattr(node, self._slot, None)
        self._stale += 1
        if self._stale > max(MIN_STALE, (len(self._queue) + len(self._heap)) // 2):
            self._queue = deque(sorted(self._valid()))
            self._heap = []
            self._stale = 0

    def pop(self) -> Leaf | None:
        """The next node to evict, or None. It is no candidate any more until it is offered again."""
        while (entry := self._take_first()) is not None:
            node: Leaf = entry.node
            if getattr(node, self._slot) is not entry:
                self._stale -= 1
                continue
            setattr(node, self._slot, None)
            if not self._evictable(node):
                continue
            if self._order(node) > entry.key:
                self.offer(node)
                continue
            return node
        return None

    def _take_first(self) -> Entry | None:
        if self._queue and (not self._heap or self._queue[0] < self._heap[0]):
            return self._queue.popleft()
        return heapq.heappop(self._heap) if self._heap else None

    def park(self, node: Leaf) -> None:
        """Set a popped node aside until `unpark`: a copy reads its pages."""
        self._parked.append(node)

    def unpark(self) -> None:
        """Offer every parked node again."""
        parked, self._parked = self._parked, []
        for node in parked:
            self.offer(node)

    def sees(self, node: Leaf) -> bool:
        """Has the node an entry, or is it parked? For `check_integrity`, which also compares `entries`."""
        return getattr(node, self._slot) is not None or node in self._parked

    def entries(self) -> tuple[int, int]:
        """Number of valid entries, as many as nodes that carry one; and of those among a namespace's own leaves."""
        return len(self._queue) + len(self._heap) - self._stale, 0

    def _valid(self) -> list[Entry]:
        slot = self._slot
        valid = [entry for entry in self._queue if getattr(entry.node, slot) is entry]
        if self._heap:
            valid += [entry for entry in self._heap if getattr(entry.node, slot) is entry]
        return valid
