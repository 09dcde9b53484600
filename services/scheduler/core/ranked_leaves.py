"""Evictable leaves in classes: a policy chooses among the least recently used leaf of each (after LHD, NSDI 2018).

A choice may change its mind at any time: nothing is sorted anew. One eviction costs O(classes * log leaves).
"""

from collections.abc import Callable

from services.scheduler.core.leaves import Key, Leaf, LeafHeap

Choice = Callable[[list[Key]], int]  # (class, last access) of the head of each class that has one -> the class


class RankedLeaves(LeafHeap[Leaf]):
    """A LeafHeap for each class. A node's class may change only before it is offered again."""

    def __init__(
        self,
        slot: str,
        classes: int,
        order: Callable[[Leaf], Key],  # class, last access
        evictable: Callable[[Leaf], bool],
        choose: Choice,
    ) -> None:
        super().__init__(slot, order, evictable)
        self._choose = choose
        self._heaps = [LeafHeap(slot, _in_class(number, order), evictable) for number in range(classes)]

    def offer(self, node: Leaf) -> None:
        """See LeafHeap."""
        wanted, entry = self._order(node)[0], getattr(node, self._slot)
        if entry is not None and entry.key[0] != wanted:
            self._heaps[entry.key[0]].discard(node)
        self._heaps[wanted].offer(node)

    def discard(self, node: Leaf) -> None:
        """See LeafHeap."""
        entry = getattr(node, self._slot)
        if entry is not None:
            self._heaps[entry.key[0]].discard(node)

    def pop(self) -> Leaf | None:
        """See LeafHeap."""
        heads = [key for heap in self._heaps if (key := self._head(heap)) is not None]
        return self._heaps[self._choose(heads)].pop() if heads else None

    def entries(self) -> tuple[int, int]:
        """See LeafHeap."""
        return sum([heap.entries()[0] for heap in self._heaps]), 0

    def _head(self, heap: LeafHeap[Leaf]) -> Key | None:
        node = heap.pop()
        if node is None:
            return None
        heap.offer(node)
        key: Key = getattr(node, self._slot).key
        return key


def _in_class(number: int, order: Callable[[Leaf], Key]) -> Callable[[Leaf], Key]:
    return lambda node: (number, order(node)[1])
