"""Page ids of one pool: which are free, and which a copy reads (pins)."""

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from services.scheduler.core.leaves import LeafHeap, Order, host_evictable
from shared.errors import IntegrityError
from shared.messages.storage import BackendInfo

if TYPE_CHECKING:
    from services.scheduler.core.node import Node

Pages = npt.NDArray[np.int32]
NO_PAGES: Pages = np.empty(0, np.int32)
ONE, UNSET = np.array(1, np.int32), np.array(False)  # numpy takes arrays of no dimension soonest


def joined(parts: list[Pages]) -> Pages:
    """The parts as one list of ids; a single part as it is."""
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else NO_PAGES


def some(flags: npt.NDArray[Any]) -> bool:
    """Is any of them not zero? Of the short lists that these are, bytes are searched sooner than by numpy's `any`."""
    return bool(flags.tobytes().strip(b"\0"))


class PagePool:
    """A stack of free ids. Who holds an id that isn't free is known by the holder alone.

    A list of ids comes and goes in one copy, whatever its length: nothing is noted for each id. That nobody gives an id
    back twice is proven by `check_integrity`; here only a pool that would have more free pages than pages says so.

    A pool whose memory is gone (its process ended) is `dead`: ids given back to it vanish.
    """

    def __init__(self, first: int, count: int) -> None:
        self.total = count
        self.dead = False
        self.end = first + count
        self._stack = np.arange(self.end - 1, first - 1, -1, dtype=np.int32)
        self._top = count

    @property
    def available(self) -> int:
        """Number of free pages."""
        return self._top

    def alloc(self, count: int) -> Pages | None:
        """`count` pages, or None (and nothing taken) when fewer are free."""
        if count > self._top:
            return None
        self._top -= count
        return self._stack[self._top : self._top + count].copy()

    def free(self, pages: Pages) -> None:
        """Give pages back. Raises IntegrityError when more come back than were handed out."""
        count = len(pages)
        if self.dead or not count:
            return
        top = self._top + count
        if top > self.total:
            raise IntegrityError(f"of pages {pages.tolist()} some were freed twice: {self.total} make up the pool")
        self._stack[self._top : top] = pages
        self._top = top

    def take(self, pages: Pages) -> None:
        """Take these very pages. Raises IntegrityError when one is not free."""
        left = self.free_pages()
        left = left[~np.isin(left, pages)]
        if len(left) != self._top - len(pages):
            raise IntegrityError(f"pages {pages.tolist()} can't be taken")
        self._top = len(left)
        self._stack[: self._top] = left

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
            at = pages.astype(np.intp)  # numpy would convert it for each use
            self.archived[at] = self.read[at] = UNSET
        return pages

    @property
    def orphaned(self) -> Pages:
        """The orphaned pages."""
        return np.fromiter(self.orphans.values(), np.int32, len(self.orphans))

    def pin(self, pages: Pages) -> None:
        """A copy is about to read these pages: they keep their bytes and names until `unpin`."""
        self.pins[pages.astype(np.intp)] += ONE

    def unpin(self, pages: Pages) -> None:
        """The copy has ended. Raises IntegrityError below zero."""
        at = pages.astype(np.intp)
        self.pins[at] -= ONE
        if some(self.pins[at] < 0):
            raise IntegrityError(f"host pages {pages.tolist()} of {self.storage_id} unpinned twice")
