"""Host pages of a storage on another host: a put for a write, a get for a load.

A write fills buffers here, whose pages go out uncopied; it has ended when the storage has placed the last one. A load
hands out each page where ZeroMQ received it, so that the copy to the device, which checks it, is the only one.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from services.gpu_worker.host_segment import BadPages, Check, Chunk, Chunks, PageIds
from services.gpu_worker.remote_link import PageLink, Reply, Request, Unsent
from shared.errors import SegmentError
from shared.host_layout import Bytes, HostPages
from shared.messages.pages import (
    GetPages,
    GotPage,
    Joined,
    MorePages,
    NotJoined,
    PutPage,
    PutPages,
    PutProgress,
    RequestFailed,
    Stop,
    Stopped,
)
from shared.messages.storage import SegmentInfo
from shared.packed import pack, unpack
from shared.segments import Checksums

CHUNK_BYTES = 8 * 2**20  # one buffer of a write: as many pages as one batch of a copy
BUFFERS = 2  # one is filled while the other goes out
POLL_S = 0.05  # a cancel is obeyed within it
MARGIN = 1.2  # of a grant's time: clocks differ by far less
FIRST_ROW = np.zeros(1, dtype=np.int64)


class RemoteSegment:
    """A segment behind a `PageLink`. Usable once `join` has returned."""

    def __init__(self, info: SegmentInfo, identity: str, epoch: int, on_lost: Callable[[], None]) -> None:
        """Make it inside the event loop. on_lost: called when the storage has ended a session."""
        self.epoch = info.epoch
        self.pages = info.pages
        self.link = PageLink(info, identity, epoch, on_lost)
        self._geometry = info.geometry
        self._page_bytes = info.geometry.page_bytes
        self._units = info.geometry.units
        self._chunk = max(1, CHUNK_BYTES // self._page_bytes)

    @property
    def lost(self) -> bool:
        """The storage has ended the session, or never began it."""
        return self.link.joined is None

    async def join(self) -> int:
        """Begin a session, or see that the storage still has ours; returns its number. Raises SegmentError when the
        storage can't be reached."""
        return (await self.link.join()).session

    def close(self) -> None:
        """Leave. No operation uses it any more."""
        self.link.close()

    def write(self, host_pages: PageIds, checksums: Checksums, check: Check) -> Chunks:
        """As `HostSegment.write`. Raises BadPages for pages that arrived damaged or have names, SegmentError when the
        storage is gone, TimeoutError when it is silent for longer than a grant lasts."""
        put = _Put(self.link, host_pages, check)
        buffers: list[Bytes] = []
        try:
            for turn, start in enumerate(range(0, len(host_pages), self._chunk)):
                positions = slice(start, min(start + self._chunk, len(host_pages)))
                if turn < BUFFERS:
                    buffers.append(np.empty((min(self._chunk, len(host_pages)), self._page_bytes), dtype=np.uint8))
                buffer = buffers[turn % BUFFERS]
                put.wait_placed(start - (BUFFERS - 1) * self._chunk)
                filled = HostPages(self._geometry, buffer, pool=False)
                yield Chunk(positions, filled, np.arange(positions.stop - start), None)
                for position in range(start, positions.stop):
                    put.send(position, checksums[position], buffer[position - start])
            put.wait_placed(len(host_pages))
        finally:
            put.settle()

    def read(self, host_pages: PageIds, digests: Sequence[bytes], check: Check, *, verify: bool) -> Chunks:
        """As `HostSegment.read`. Raises SegmentError and TimeoutError as `write`."""
        joined = _session(self.link)
        listed, names, done = pack(host_pages), b"".join(digests), False
        more = max(1, joined.window // 4)  # pages between two MorePages
        request = self.link.begin(lambda number: GetPages(number, listed, names, joined.window))
        try:
            for position in range(len(host_pages)):
                message, page = _next(request, check, joined)
                if not isinstance(message, GotPage) or page is None or message.position != position:
                    raise SegmentError(f"a get was answered by {type(message).__name__}")
                expected = np.frombuffer(message.checksums, "<u4")
                if len(page) != self._page_bytes or len(expected) != self._units:
                    raise SegmentError(f"a page came with {len(page)} bytes and {len(expected)} checksums")
                memory = np.frombuffer(page, np.uint8).reshape(1, self._page_bytes)
                rows = HostPages(self._geometry, memory, pool=False)
                yield Chunk(slice(position, position + 1), rows, FIRST_ROW, expected[None] if verify else None)
                if position % more == more - 1:
                    self.link.post(MorePages(request.number, position + 1 + joined.window), request=request)
            done = True
        finally:
            if not done:
                self.link.post(Stop(request.number), request=request)
            self.link.end(request)


class _Put:
    """The worker's side of a PutPages."""

    def __init__(self, link: PageLink, host_pages: PageIds, check: Check) -> None:
        self._link = link
        self._check = check
        self._joined = _session(link)
        self._count = len(host_pages)
        self._progress: PutProgress | None = None
        self._granted_s = time.monotonic()
        self._settled = False
        listed = pack(host_pages)
        self._request = link.begin(lambda number: PutPages(number, listed))

    def send(self, position: int, checksums: Checksums, page: Bytes) -> None:
        """Send a page as soon as it is allowed."""
        while self._progress is None or position >= self._progress.allowed:
            self._wait()
        crc = checksums.astype("<u4").tobytes()
        message = PutPage(self._request.number, self._progress.grant, position, crc)
        self._link.post(message, page.data, request=self._request)

    def wait_placed(self, count: int) -> None:
        """Return when the first `count` pages are in the pool."""
        while count > 0 and (self._progress is None or self._progress.placed < count):
            self._wait()
        self._settled = self._progress is not None and self._progress.placed == self._count

    def settle(self) -> None:
        """Return when nothing of it will be placed any more: the storage says so, or the last grant has ended."""
        if not self._settled:
            self._link.post(Stop(self._request.number), request=self._request)
        while not self._settled and time.monotonic() < self._granted_s + MARGIN * self._joined.grant_s:
            reply = self._request.get(POLL_S)
            self._settled = reply is not None and isinstance(reply[0], Stopped | NotJoined | RequestFailed)
        self._link.end(self._request)

    def _wait(self) -> None:
        try:
            message, _ = _next(self._request, self._check, self._joined)
        except (BadPages, _Ended):
            self._settled = True
            raise
        if not isinstance(message, PutProgress):
            raise SegmentError(f"a put was answered by {type(message).__name__}")
        self._progress, self._granted_s = message, time.monotonic()


class _Ended(SegmentError):
    """The storage has ended the request."""


def _session(link: PageLink) -> Joined:
    joined = link.joined
    if joined is None:
        raise SegmentError("the storage has ended this worker's session; the scheduler has it joined again")
    return joined


def _next(request: Request, check: Check, joined: Joined) -> Reply:
    """The next reply. Raises BadPages for a refusal of pages, TimeoutError after a grant's time without one."""
    deadline = time.monotonic() + MARGIN * joined.grant_s
    while (reply := request.get(POLL_S)) is None:
        check()
        if time.monotonic() > deadline:
            raise TimeoutError(f"the storage was silent for {MARGIN * joined.grant_s:.1f} s")
    check()
    _raise_refusal(reply[0])
    return reply


def _raise_refusal(message: Any) -> None:
    match message:
        case RequestFailed(_, "name" | "checksum" as reason, positions):
            raise BadPages(reason, -1, unpack(positions).astype(np.int64))
        case RequestFailed(_, reason, _):
            raise _Ended(f"the storage refused: {reason}")
        case NotJoined():
            raise _Ended("the storage has ended this worker's session")
        case Unsent():
            raise SegmentError("the storage can't be reached")
