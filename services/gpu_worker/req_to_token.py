"""Which slot holds which token of which request (POOL-13)."""

import torch

from shared.errors import CapacityError


class ReqToToken:
    """int32 [max_requests + 1, max_context]: `table[row, position]` is a slot. Row 0 is padding and stays 0.

    A row is written page by page as the scheduler hands pages out; what lies beyond a request's pages is stale.
    """

    def __init__(self, max_requests: int, max_context: int, page_size: int) -> None:
        """max_context: tokens in a row, rounded up to whole pages."""
        self.page_size = page_size
        self.pages_per_row = -(-max_context // page_size)
        self.table = torch.zeros(max_requests + 1, self.pages_per_row * page_size, dtype=torch.int32)
        self._offsets = torch.arange(page_size, dtype=torch.int32)

    def write_pages(self, row: int, first_page: int, pages: torch.Tensor) -> None:
        """Let the row's pages from index `first_page` on be `pages` (integers [n]). Raises CapacityError for a row or
        a position that the table doesn't have."""
        self._check(row, first_page + len(pages))
        slots = pages.to(torch.int32)[:, None] * self.page_size + self._offsets
        start = first_page * self.page_size
        self.table[row, start : start + slots.numel()] = slots.flatten()

    def slots(self, row: int, start: int, stop: int) -> torch.Tensor:
        """int64 [stop - start]: slots of the row's positions start .. stop."""
        self._check(row, -(-stop // self.page_size))
        return self.table[row, start:stop].long()

    def page_table(self, row: int, tokens: int) -> torch.Tensor:
        """int64 [ceil(tokens / page_size)]: the pages of the row's first `tokens` positions."""
        self._check(row, -(-tokens // self.page_size))
        return self.table[row, : tokens : self.page_size].long() // self.page_size

    def _check(self, row: int, pages: int) -> None:
        if not 1 <= row < len(self.table):
            raise CapacityError(f"row {row} is outside 1..{len(self.table) - 1}; raise max_requests")
        if pages > self.pages_per_row:
            raise CapacityError(f"{pages} pages don't fit in a row of {self.pages_per_row}; raise max_context")
