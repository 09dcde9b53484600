"""A simulated GPU: the slots of the KV pool, the page tables, and the forward pass on them."""

from typing import TYPE_CHECKING

from kvtide.simulation.content import EMPTY, PageContent, Slot, attend, next_token, of_rank, walk
from shared.messages.worker import Sampled, StepItem
from shared.packed import unpack

if TYPE_CHECKING:
    from kvtide.simulation.world import World


class Device:
    """What a worker process loses when it ends."""

    def __init__(self, world: "World", rank: int) -> None:
        self._rank = rank
        self._world = world
        self._size = world.plan.settings.page_size
        self._slots: list[Slot] = [EMPTY] * (world.plan.device_pages * self._size)
        self._table: dict[int, list[int]] = {}  # row -> pages
        self._length: dict[int, int] = {}  # row -> computed tokens
        self._last: dict[int, int] = {}  # row -> last sampled token
        self._broken: set[int] = set()  # rows whose last step failed

    def read(self, page: int) -> PageContent:
        """What a page holds."""
        return tuple(self._slots[page * self._size : (page + 1) * self._size])

    def fill(self, page: int, content: PageContent) -> None:
        """Copy a page in."""
        self._slots[page * self._size : (page + 1) * self._size] = content

    def touched(self, item: StepItem) -> set[int]:
        """Pages that the item's tokens may be written to."""
        return {*unpack(item.pages).tolist(), *self._table.get(item.row, [])[-1:]}

    def pages_of(self, item: StepItem) -> list[int]:
        """Pages that hold the row up to the item's last token."""
        return self._table.get(item.row, [])[: -(-(item.start + count_tokens(item)) // self._size)]

    def write_row(self, item: StepItem) -> bool:
        """Update the item's page table. False when an earlier step of the row is missing: nothing may be computed.

        A row goes on where it stands, or begins anew with its whole page list: else a lost step would make the next
        one write into pages of the row's last owner.
        """
        plan = self._world.plan
        if not 1 <= item.row <= plan.rows:
            self._world.fail(f"there is no row {item.row}")
        if (item.first_page or not item.tokens) and self._length.get(item.row) != item.start:
            if item.row not in self._broken:
                self._world.fail(f"row {item.row} can't go on at page {item.first_page}, token {item.start}")
            self._world.seen["step_overtook"] += 1
            return False
        row = self._table.setdefault(item.row, [])
        row[item.first_page :] = unpack(item.pages).tolist()
        needed = -(-(item.start + count_tokens(item)) // self._size)
        if len(row) < needed or any(not 1 <= page < plan.device_pages for page in row):
            self._world.fail(f"row {item.row} has pages {row} for {item.start + count_tokens(item)} tokens")
        return True

    def forward(self, item: StepItem, root: int) -> list[Sampled]:
        """Read the whole prefix, compute the item's tokens, sample if it says so."""
        after = attend(root, [self._slots[self._slot(item.row, at)] for at in range(item.start)], self._rank)
        tokens = unpack(item.tokens).tolist() or [self._last[item.row]]
        slots = walk(after, tokens)
        after = slots[-1].after
        for at, slot in enumerate(of_rank(slots, self._rank), item.start):
            self._slots[self._slot(item.row, at)] = slot
        self._broken.discard(item.row)
        self._length[item.row] = item.start + len(tokens)
        if item.sampling is None:
            return []
        token = self._last[item.row] = next_token(after)
        return [Sampled(item.row, token, -0.5, b"", b"")]

    def fail(self, item: StepItem, *, spoil: bool) -> None:
        """The step ends without result; its slots may hold anything."""
        self._broken.add(item.row)
        if spoil:
            for at in range(item.start, item.start + count_tokens(item)):
                self._slots[self._slot(item.row, at)] = EMPTY

    def _slot(self, row: int, at: int) -> int:
        return self._table[row][at // self._size] * self._size + at % self._size


def count_tokens(item: StepItem) -> int:
    """Tokens that an item computes."""
    return len(item.tokens) // 4 or 1
