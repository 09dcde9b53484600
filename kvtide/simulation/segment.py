"""Simulated shared memory: it outlives the storage that made it for as long as a worker maps it."""

from typing import NamedTuple

from kvtide.simulation.content import EMPTY, PageContent
from services.scheduler.core.events import PeerKey
from shared.geometry import PageGeometry
from shared.messages.storage import SegmentInfo


class Name(NamedTuple):
    """What the name table says of a page."""

    digest: bytes
    checksums: bytes


class Segment:
    """Pages, their names, and who maps them."""

    def __init__(self, storage_id: str, epoch: int, pages: int, geometry: PageGeometry, model: bytes) -> None:
        self.info = SegmentInfo(storage_id, f"/sim/{storage_id}.{epoch}", epoch, pages, 1, pages - 1, geometry, model)
        self.content: list[PageContent] = [(EMPTY,) * geometry.page_size] * pages
        self.names: dict[int, Name] = {}
        self.holders: set[PeerKey] = set()
        self.exited: set[PeerKey] = set()  # processes that held it when they ended
        self.spoilt: set[int] = set()  # pages that a fault has changed
        self.writes = 0
