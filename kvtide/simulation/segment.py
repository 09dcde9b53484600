"""Simulated shared memory: it outlives the storage that made it for as long as a worker maps it."""

from typing import NamedTuple

from msgspec.structs import force_setattr

from kvtide.simulation.content import EMPTY, PageContent
from services.scheduler.core.events import PeerKey
from shared.geometry import PageGeometry, Part
from shared.messages.storage import SegmentInfo


def geometry(page_size: int, rank: int, ranks: int) -> PageGeometry:
    """One byte-sized part. (PageGeometry itself refuses more ranks than one until there is a layout for them.)"""
    made = PageGeometry(page_size, 1, (Part("k", 1, 1, "float32"),))
    force_setattr(made, "tp_rank", rank)
    force_setattr(made, "tp_size", ranks)
    return made


class Name(NamedTuple):
    """What the name table says of a page."""

    digest: bytes
    checksums: bytes  # uint32 for each rank


class Segment:
    """Pages, their names, and who maps them."""

    @property
    def leased(self) -> range:
        """Pages that are the simulated scheduler's."""
        return range(self.info.first_page, self.info.first_page + self.info.page_count)

    def parts(self, page: int) -> tuple[PageContent, ...]:
        """What a page holds, for each rank."""
        return tuple(pages[page] for pages in self.content)

    def __init__(
        self, storage_id: str, epoch: int, pages: int, lease: tuple[int, int], geometry: PageGeometry, model: bytes
    ) -> None:
        path = f"/sim/{storage_id}.{epoch}"
        self.info = SegmentInfo(storage_id, path, epoch, pages, *lease, geometry, model)
        empty = (EMPTY,) * geometry.page_size
        self.content: list[list[PageContent]] = [[empty] * pages for _ in range(geometry.tp_size)]  # by rank
        self.names: dict[int, Name] = {}
        self.holders: set[PeerKey] = set()
        self.exited: set[PeerKey] = set()  # processes that held it when they ended
        self.spoilt: set[int] = set()  # pages that a fault has changed
        self.writes = 0
