"""Page ids of one pool: which are free, and which a copy reads (pins)."""

from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from services.scheduler.core.leaves import LeafHeap, Order, host_evictable
from shared.errors import IntegrityError
from shared.messages.storage import BackendInfo

if TYPE_CHECKING:
    from services.scheduler.core.node import Node

Pages = npt.NDArray[np.int32]
NO_PAGES: Pages = np.empty(0, np.int32)
NOT_FREE: Pages = np.array(-1, np.int32)  # in `PagePool._place`; numpy takes an array of no dimension soonest


def joined(parts: list[Pages]) -> Pages:
    """The parts as one list of ids; a single part as it is."""
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else NO_PAGES


class PagePool:
    """A stack of free ids. Who holds an id that isn't free is known by the holder alone.

    A pool whose memory is gone (its process ended) is `dead`: ids given back to it vanish.
    """

    def __init__(self, first: int, count: int) -> None:
        self.total = count
        self.dead = False
        self.end = first + count
        self._stack = np.arange(self.end - 1, first - 1, -1, dtype=np.int32)
        self._top = count
        self._numbers = np.arange(count, dtype=np.int32)
        self._place = np.full(self.end, -1, dtype=np.int32)  # of each id in the stack; -1 = not free
        self._place[self._stack] = self._numbers

    @property
    def available(self) -> int:
        """Number of free pages."""
        return self._top

    def alloc(self, count: int) -> Pages | None:
        """`count` pages, or None (and nothing taken) when fewer are free."""
        if count > self._top:
            return None
        self._top -= count
        pages = self._stack[self._top : self._top + count].copy()
        self._place[pages.astype(np.intp)] = NOT_FREE
        return pages

    def free(self, pages: Pages) -> None:
        """Give pages back. Raises IntegrityError for a page that is free already or named twice."""
        if self.dead or not len(pages):
            return
        top = self._top + len(pages)
        at = pages.astype(np.intp)  # numpy would convert it for each use
        places = self._numbers[self._top : top]
        # bytes are compared in a third of the time that a ufunc takes
        fresh = len(places) == len(at) and self._place[at].tobytes() == NOT_FREE.tobytes() * len(at)
        if fresh:
            self._place[at] = places
        if not fresh or self._place[at].tobytes() != places.tobytes():  # one id has taken two places
            raise IntegrityError(f"pages {pages.tolist()} freed twice")
        self._stack[self._top : top] = pages
        self._top = top

    def take(self, pages: Pages) -> None:
        """Take these very pages. Raises IntegrityError when one is not free."""
        if (self._place[pages] < 0).any() or len(np.unique(pages)) != len(pages):
            raise IntegrityError(f"pages {pages.tolist()} can't be taken")
        self._place[pages] = -1
        left = self._stack[: self._top]
        left = left[self._place[left] >= 0]
        self._top = len(left)
        self._stack[: self._top] = left
        self._place[left] = np.arange(self._top, dtype=np.int32)

    def free_pages(self) -> Pages:
        """The free ids, for `check_integrity`."""
        return self._stack[: self._top]


class HostPool(PagePool):
    """The leased range of one segment. It dies with the segment."""

    def __init__(
        self,
        storage_id: str,
        segment_epoch: int,
        first: int,
        count: int,
        order: Order = lambda node: (0, node.last_access),
    ) -> None:
        super().__init__(first, count)
        self.leaves: LeafHeap[Node] = LeafHeap("host_entry", order, host_evictable)
        self.backend: BackendInfo | None = None  # its storage's L3
        self.since = 0.0  # when it came
        self.orphans: OrderedDict[bytes, int] = OrderedDict()  # an earlier scheduler's pages by digest, oldest first
        self.storage_id = storage_id
        self.segment_epoch = segment_epoch
        self.draining = False  # an administrator wants it empty: nothing new goes there
        self.usable = False  # its storage has fenced and every rank maps it
        self.pins = np.zeros(self.end, dtype=np.int32)
        self.archived = np.zeros(self.end, dtype=np.bool_)  # L3 has it, or was asked to store it
        self.read = np.zeros(self.end, dtype=np.bool_)  # it was loaded back since it was filled
        self.cached = 0  # pages of nodes
        self.prefetching = 0  # pages held by prefetches
        self.archiving = 0  # pages pinned by archiving
        self.releasing = 0  # pages whose Released is awaited

    def alloc(self, count: int) -> Pages | None:
        """See PagePool."""
        pages = super().alloc(count)
        if pages is not None:
            self.archived[pages] = self.read[pages] = False
        return pages

    @property
    def orphaned(self) -> Pages:
        """The orphaned pages."""
        return np.fromiter(self.orphans.values(), np.int32, len(self.orphans))

    def pin(self, pages: Pages) -> None:
        """A copy is about to read these pages: they keep their bytes and names until `unpin`."""
        self.pins[pages] += 1

    def unpin(self, pages: Pages) -> None:
        """The copy has ended. Raises IntegrityError below zero."""
        self.pins[pages] -= 1
        if (self.pins[pages] < 0).any():
            raise IntegrityError(f"host pages {pages.tolist()} of {self.storage_id} unpinned twice")
