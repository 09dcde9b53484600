"""Another replica on the same storages: it owns a range of every segment, and sees when somebody touches that."""

import random
from typing import TYPE_CHECKING

from kvtide.simulation.content import PageContent, Slot, checksum
from kvtide.simulation.segment import Name, Segment

if TYPE_CHECKING:
    from kvtide.simulation.world import World

VISITS = 12  # to one segment
EVERY_S = 0.3


def lease(pages: int, replicas: int, number: int) -> tuple[int, int]:
    """First page and number of pages of a replica's range, in a segment of `pages` pages with its header."""
    count = (pages - 1) // replicas
    return 1 + number * count, count


class Neighbour:
    """Names pages of its range and takes the names back. Its own scheduler isn't simulated, only what it does."""

    def __init__(self, world: "World", segment: Segment, pages: range) -> None:
        self._world = world
        self._segment = segment
        self._pages = pages
        self._rng = random.Random(f"neighbour {segment.info.epoch} {world.plan.seed}")
        self._kept: dict[int, tuple[PageContent, Name]] = {}
        self._visits = 0
        self._visit()

    def check(self) -> None:
        """What it has written is there, and nothing else has a name."""
        segment = self._segment
        for page in self._pages:
            content, name = self._kept.get(page, (None, None))
            if segment.names.get(page) != name or (content is not None and segment.content[0][page] != content):
                self._world.fail(f"host page {page} of {segment.info.storage_id} is another replica's and was changed")

    def _visit(self) -> None:
        self.check()
        page, number = self._rng.choice(self._pages), self._rng.randrange(1 << 30)
        if page in self._kept:
            del self._kept[page], self._segment.names[page]
        else:
            content = (Slot(-number, number),) * self._world.plan.settings.page_size
            parts = (content,) * self._world.ranks
            for rank, part in enumerate(parts):
                self._segment.content[rank][page] = part
            name = Name(number.to_bytes(32, "little"), checksum(parts))
            self._segment.names[page] = name
            self._kept[page] = (content, name)
        self._world.seen["neighbour_visit"] += 1
        self._visits += 1
        if self._visits < VISITS:
            self._world.clock.after(EVERY_S * self._rng.random(), self._visit)
