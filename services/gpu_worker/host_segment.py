"""A storage's host pages as copies see them, however the bytes travel."""

from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from shared.errors import KvtideError
from shared.host_layout import HostPages
from shared.messages.storage import SegmentInfo
from shared.populate import populate
from shared.segments import Checksums, MappedSegment, map_segment

POPULATE_END_S = 1.0  # a step takes less than 1 ms; more on a machine that is short of processors

PageIds = npt.NDArray[np.int64]
Check = Callable[[], None]  # raises when the operation was cancelled


class BadPages(KvtideError):
    """Host pages that can't be trusted: `reason` "name" or "checksum", positions in the operation's page list."""

    def __init__(self, reason: str, layer: int, positions: PageIds) -> None:
        super().__init__(f"{len(positions)} pages failed: reason={reason} layer={layer}")
        self.reason = reason
        self.layer = layer
        self.positions = positions


class Chunk(NamedTuple):
    """Host pages that can be copied now."""

    positions: slice  # in the operation's page lists
    pages: HostPages
    rows: PageIds  # int64, of `pages`: one for each position
    expected: Checksums | None  # uint32 [n, units]; None where nothing is to be compared


Chunks = Generator[Chunk, None, None]


class HostSegment(Protocol):
    """A segment that this worker may use. Both iterators run on a stream's thread and are closed by it."""

    @property
    def epoch(self) -> int:
        """ns since 1970, of the segment."""

    @property
    def pages(self) -> int:
        """Pages in the segment, page 0 included."""

    def write(self, host_pages: PageIds, checksums: Checksums, check: Check) -> Chunks:
        """Chunks to be filled, in order. The caller fills a chunk and its rows of `checksums`, uint32 [n, units],
        before it asks for the next. At the end of the iteration all bytes are in host memory; once it has ended, or is
        closed, nothing of it is put any more."""

    def read(self, host_pages: PageIds, digests: Sequence[bytes], check: Check, *, verify: bool) -> Chunks:
        """Chunks that hold host pages, in order, each until the next is asked for.

        Raises BadPages("name"), before the first, for pages that are unnamed or have another digest.
        """

    def close(self) -> None:
        """Let it go. No operation uses it any more."""


class MappedHostSegment:
    """Shared memory: one chunk for everything, and copies go straight into the pool."""

    def __init__(self, info: SegmentInfo, identity: str, epoch: int) -> None:
        """Raises SegmentError when it can't be mapped."""
        segment = map_segment(info, identity, epoch)
        self._segment: MappedSegment = segment
        self._populating = populate(lambda: segment.pages_array)

    @property
    def epoch(self) -> int:
        return self._segment.epoch

    @property
    def pages(self) -> int:
        return self._segment.pages

    def write(self, host_pages: PageIds, checksums: Checksums, check: Check) -> Chunks:
        yield Chunk(slice(0, len(host_pages)), self._segment.host_pages, host_pages, None)

    def read(self, host_pages: PageIds, digests: Sequence[bytes], check: Check, *, verify: bool) -> Chunks:
        expected = self._expected(host_pages, digests) if verify else None
        yield Chunk(slice(0, len(host_pages)), self._segment.host_pages, host_pages, expected)

    def close(self) -> None:
        self._segment.close()
        self._populating.join(POPULATE_END_S)  # until then it may hold the map, and with it the lock file

    def _expected(self, host_pages: PageIds, digests: Sequence[bytes]) -> Checksums:
        names = self._segment.names_of(host_pages)
        wanted = np.frombuffer(b"".join(digests), np.uint8).reshape(names.digests.shape)
        bad = np.flatnonzero(~names.named | (names.digests != wanted).any(axis=1))
        if bad.size:
            raise BadPages("name", -1, bad)
        return names.checksums
