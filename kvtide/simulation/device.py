"""A simulated GPU: the slots of the KV pool, the page tables, and the forward pass on them."""

from typing import TYPE_CHECKING

from kvtide.simulation.content import EMPTY, PageContent, Slot, attend, next_token, of_rank, walk
from shared.messages.worker import Sampled, StepItem
from shared.packed import unpack_list

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
        return {*unpack_list(item.pages), *self._table.get(item.row, [])[-1:]}

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
        row[item.first_page :] = unpack_list(item.pages)
        needed = -(-(item.start + count_tokens(item)) // self._size)
        if len(row) < needed or any(not 1 <= page < plan.device_pages for page in row):
            self._world.fail(f"row {item.row} has pages {row} for {item.start + count_tokens(item)} tokens")
        return True

    def forward(self, item: StepItem, root: int) -> list[Sampled]:
        """Read the whole prefix, compute the item's tokens, sample if it says so."""
        row, size = self._table[item.row], self._size
        prefix = [self._slots[row[at // size] * size + at % size] for at in range(item.start)]
        after = attend(root, prefix, self._rank)
        tokens = unpack_list(item.tokens) or [self._last[item.row]]
        slots = walk(after, tokens)
        after = slots[-1][1]
        for at, slot in enumerate(of_rank(slots, self._rank), item.start):
            self._slots[row[at // size] * size + at % size] = slot
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
            row, size = self._table[item.row], self._size
            for at in range(item.start, item.start + count_tokens(item)):
                self._slots[row[at // size] * size + at % size] = EMPTY


def count_tokens(item: StepItem) -> int:
    """Tokens that an item computes."""
    return len(item.tokens) // 4 or 1
