"""What a remote worker asks for: a put fills unnamed host pages, a get sends named ones.

A put must not touch a page after its worker has given it up, even if frames are still on their way. So every
PutProgress is a grant with an end: a page that names an older one is dropped. The grant's clock starts here before the
worker can hear of it; so a worker that waits `GRANT_S` and a margin after the last grant it got knows, without an
answer, that nothing more will be put.
"""

import time
from collections.abc import Callable

import numpy as np

from services.storage.operations import RefusedError
from services.storage.page_file import PageFormat
from services.storage.transfers import page_list
from shared.errors import SegmentError
from shared.host_layout import Bytes
from shared.messages.pages import GetPages, GotPage, PutPage, PutPages, PutProgress
from shared.packed import unpack
from shared.segments import OwnedSegment, PageIds

GRANT_S = 5.0  # a window of pages takes 50 ms on a fast network, 3 s at 100 Mbit/s

Clock = Callable[[], float]


class Put:
    """Pages that come. Nothing here awaits: `place` runs in a thread, one at a time."""

    def __init__(self, segment: OwnedSegment, message: PutPages, window: int, clock: Clock = time.monotonic) -> None:
        """Raises SegmentError for pages that don't exist, RefusedError for named ones: their release isn't acked."""
        self.request = message.request
        self.pages: PageIds = unpack(message.pages)
        self._segment = segment
        self._format = PageFormat(segment.model_fingerprint, segment.geometry)
        self._window = window
        self._clock = clock
        self._placed: set[int] = set()
        self._issued: list[float] = []  # when each grant was made
        if not len(self.pages) or len(np.unique(self.pages)) != len(self.pages):
            raise SegmentError(f"a put of {len(self.pages)} pages, {len(np.unique(self.pages))} of them different")
        named = [position for position, page in enumerate(self.pages) if segment.name_of(int(page))]
        if named:
            raise RefusedError("name", f"a put into pages {self.pages[named][:4].tolist()}, which have names", named)

    @property
    def done(self) -> bool:
        """Every page is in its place."""
        return len(self._placed) == len(self.pages)

    @property
    def over(self) -> bool:
        """No page can come any more: the last grant has ended."""
        return not self._granted(len(self._issued) - 1)

    def grant(self) -> PutProgress:
        """Allow the next pages."""
        self._issued.append(self._clock())
        placed = len(self._placed)
        return PutProgress(self.request, len(self._issued) - 1, placed, min(placed + self._window, len(self.pages)))

    def place(self, message: PutPage, page: memoryview) -> bool:
        """Check a page and copy it into the pool. False when its grant has ended.

        Raises SegmentError for a page that isn't asked for, RefusedError for damaged bytes or a page that has a name.
        """
        position, geometry = message.position, self._segment.geometry
        if not 0 <= position < len(self.pages) or position in self._placed:
            raise SegmentError(f"position {position} of a put of {len(self.pages)} pages is wrong or came before")
        checksums = np.frombuffer(message.checksums, "<u4")
        if len(page) != geometry.page_bytes or len(checksums) != geometry.units:
            raise SegmentError(f"a page of {len(page)} bytes and {len(checksums)} checksums")
        if (self._format.checksums_of(page) != checksums).any():
            raise RefusedError("checksum", f"position {position} arrived with other bytes", [position])
        host_page = int(self.pages[position])
        if self._segment.name_of(host_page):
            raise RefusedError("name", f"page {host_page} got a name during a put", [position])
        if not self._granted(message.grant):
            return False
        self._segment.host_pages.put(host_page, np.frombuffer(page, np.uint8))
        self._placed.add(position)
        return True

    def _granted(self, grant: int) -> bool:
        return 0 <= grant < len(self._issued) and self._clock() < self._issued[grant] + GRANT_S


class Get:
    """Pages that go."""

    def __init__(self, segment: OwnedSegment, message: GetPages) -> None:
        """Raises SegmentError for lists that don't fit, RefusedError for pages that are unnamed or named otherwise."""
        self.request = message.request
        self.allowed = message.allowed
        self.pages, self._digests = page_list(segment, message.pages, message.digests)
        self._segment = segment
        self._next = 0
        bad = [position for position in range(len(self.pages)) if self._name(position) is None]
        if bad:
            raise RefusedError("name", f"a get of pages {self.pages[bad][:4].tolist()}, which have other names", bad)

    @property
    def done(self) -> bool:
        """Every page has been sent."""
        return self._next == len(self.pages)

    @property
    def may_send(self) -> bool:
        """Is there a page that may go now?"""
        return self._next < min(self.allowed, len(self.pages))

    def next_page(self) -> tuple[GotPage, Bytes]:
        """The next page and where it lies. Raises RefusedError when it has lost its name meanwhile."""
        position = self._next
        checksums = self._name(position)
        if checksums is None:
            raise RefusedError("name", f"page {self.pages[position]} lost its name during a get", [position])
        self._next += 1
        return GotPage(self.request, position, checksums), self._segment.host_pages.get(int(self.pages[position]))

    def _name(self, position: int) -> bytes | None:
        name = self._segment.name_of(int(self.pages[position]))
        if name is None or name.digest != self._digests[position]:
            return None
        return name.checksums.astype("<u4").tobytes()
