"""Page ids of one pool: which are free, and which a copy reads (pins)."""

import numpy as np
import numpy.typing as npt

from shared.errors import IntegrityError

Pages = npt.NDArray[np.int32]
NO_PAGES: Pages = np.empty(0, np.int32)


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
        self._is_free = np.zeros(self.end, dtype=np.bool_)
        self._is_free[first:] = True

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
        self._is_free[pages] = False
        return pages

    def free(self, pages: Pages) -> None:
        """Give pages back. Raises IntegrityError for a page that is free already or named twice."""
        if self.dead or not len(pages):
            return
        if self._is_free[pages].any() or len(np.unique(pages)) != len(pages):
            raise IntegrityError(f"pages {pages.tolist()} freed twice")
        self._is_free[pages] = True
        self._stack[self._top : self._top + len(pages)] = pages
        self._top += len(pages)

    def free_pages(self) -> Pages:
        """The free ids, for `check_integrity`."""
        return self._stack[: self._top]


class HostPool(PagePool):
    """The leased range of one segment. It dies with the segment."""

    def __init__(self, storage_id: str, segment_epoch: int, first: int, count: int) -> None:
        super().__init__(first, count)
        self.storage_id = storage_id
        self.segment_epoch = segment_epoch
        self.usable = False  # its storage has fenced and every rank maps it
        self.pins = np.zeros(self.end, dtype=np.int32)
        self.cached = 0  # pages of nodes
        self.prefetching = 0  # pages held by prefetches
        self.archiving = 0  # pages pinned by archiving
        self.releasing = 0  # pages whose Released is awaited

    def pin(self, pages: Pages) -> None:
        """A copy is about to read these pages: they keep their bytes and names until `unpin`."""
        self.pins[pages] += 1

    def unpin(self, pages: Pages) -> None:
        """The copy has ended. Raises IntegrityError below zero."""
        self.pins[pages] -= 1
        if (self.pins[pages] < 0).any():
            raise IntegrityError(f"host pages {pages.tolist()} of {self.storage_id} unpinned twice")
