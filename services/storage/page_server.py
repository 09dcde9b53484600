"""Host pages over ZeroMQ, for workers that can't map the pool.

One session for each worker process, known by its last message. A worker that is silent for SESSION_S, or whose
successor joins, is revoked: what it sends afterwards is refused, which is as good as its exit. Sessions are the remote
counterpart of the lock files beside a segment, and reach the scheduler in the same lists.
"""

import asyncio
import itertools
import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from services.storage.operations import RefusedError
from services.storage.page_server_requests import GRANT_S, Get, Put
from shared.errors import ProtocolError, SegmentError
from shared.messages import ToPageServer
from shared.messages.common import Envelope, Message
from shared.messages.pages import (
    GetPages,
    Join,
    Joined,
    Leave,
    MorePages,
    NotJoined,
    PutPage,
    PutPages,
    RequestFailed,
    Stop,
    Stopped,
)
from shared.messages.storage import Holder
from shared.packed import pack
from shared.segments import OwnedSegment
from shared.transport import Counters, Decoder, Router, decode_envelope, encode

WINDOW_BYTES = 32 * 2**20  # of one put under way: fills a 10 Gbit/s link over a round trip of 25 ms
MIN_WINDOW = 2  # pages: one is placed while the next one comes
ALIVE_S = 2.0  # between two messages of a worker
SESSION_S = 5 * ALIVE_S  # of silence: above any stall of a worker's event loop on a busy machine
MAX_REQUESTS = 64  # of a session: twice the copies that a worker has in flight
SWEEP_S = 1.0  # between two looks for silent sessions
ANY_HOST = ("0.0.0.0", "*", "[::]")

log = logging.getLogger("kvtide.pages")


@dataclass(eq=False)
class Session:
    """A worker process that has joined."""

    holder: Holder
    heard_s: float
    puts: dict[int, Put] = field(default_factory=dict)  # by request
    gets: dict[int, Get] = field(default_factory=dict)  # by request


class PageServer:
    """Serves the pages of open segments. It belongs to the event loop; only `Put.place` runs in a thread."""

    def __init__(self, endpoint: str, current: Callable[[int], OwnedSegment | None], advertise: str = "") -> None:
        """Bind. `current` gives the open segment of an epoch. advertise: what workers connect to, if not `endpoint`.

        Raises ProtocolError when the endpoint can't be bound."""
        self.endpoint = advertise or reachable(endpoint)
        self.counters = Counters()
        self._current = current
        self._router = Router(endpoint)
        self._decode = Decoder(ToPageServer)
        self._sessions: dict[str, Session] = {}  # by the socket's identity
        self._numbers = itertools.count(1)  # of sessions
        self._busy = asyncio.Lock()  # a session isn't revoked while a page of it is copied

    async def run(self) -> None:
        """Serve until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._receive())
            tasks.create_task(self._sweep())

    def close(self) -> None:
        """Close the socket. What workers still send is lost."""
        self._router.close()

    def holders(self) -> list[Holder]:
        """Processes that may still write. One that is missing from it will not: the pool reports it as exited."""
        return [session.holder for session in self._sessions.values()]

    def stats(self) -> dict[str, float]:
        """For the heartbeat."""
        count = {"remote_sessions": len(self._sessions), "remote_denied": self._router.denied}
        return {**count, **{f"remote_{name}": n for name, n in self.counters.items()}}

    async def _receive(self) -> None:
        while True:
            peer, frames, page = await self._router.receive_page()
            try:
                if len(frames) != 2:
                    raise ProtocolError(f"a message has 2 frames and maybe a page, not {len(frames)}")
                envelope, message = decode_envelope(*frames), self._decode(frames[1])
            except ProtocolError as error:
                self.counters.malformed(peer, error)
                continue
            async with self._busy:
                await self._take(peer, envelope, message, page)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            async with self._busy:
                now = time.monotonic()
                for peer, session in list(self._sessions.items()):
                    session.puts = {request: put for request, put in session.puts.items() if not put.over}
                    if now - session.heard_s > SESSION_S:
                        self._revoke(peer, "silent")
                    elif self._current(session.holder.segment_epoch) is None:
                        self._revoke(peer, "segment_replaced")

    # ---- sessions ----

    async def _take(self, peer: str, envelope: Envelope, message: Any, page: memoryview | None) -> None:
        segment, session = self._current(envelope.receiver_epoch), self._sessions.get(peer)
        if segment is None:
            if session is not None:
                self._revoke(peer, "segment_replaced")
            self._send(peer, envelope, NotJoined())
        elif isinstance(message, Join):
            self._join(peer, envelope, message, segment)
        elif session is None or session.holder.epoch != envelope.sender_epoch:
            self.counters["not_joined"] += 1
            self._send(peer, envelope, NotJoined())
        else:
            session.heard_s = time.monotonic()
            await self._serve(peer, envelope, session, segment, message, page)

    def _join(self, peer: str, envelope: Envelope, message: Join, segment: OwnedSegment) -> None:
        holder = Holder(message.identity, envelope.sender_epoch, segment.epoch)
        for other, session in list(self._sessions.items()):
            known = session.holder
            if (
                known.identity == holder.identity
                and known.segment_epoch == segment.epoch
                and known.epoch < holder.epoch
            ):
                self._revoke(other, "replaced")
        if peer not in self._sessions:
            self._sessions[peer] = Session(replace(holder, session=next(self._numbers)), time.monotonic())
            log.info("remote_joined identity=%s epoch=%d", holder.identity, holder.epoch)
        number = self._sessions[peer].holder.session
        self._send(peer, envelope, Joined(window(segment), GRANT_S, ALIVE_S, number))

    def _revoke(self, peer: str, why: str) -> None:
        holder = self._sessions.pop(peer).holder
        log.info("remote_left identity=%s epoch=%d reason=%s", holder.identity, holder.epoch, why)

    # ---- requests ----

    async def _serve(
        self, peer: str, envelope: Envelope, session: Session, segment: OwnedSegment, message: Any,
        page: memoryview | None,
    ) -> None:  # fmt: skip
        try:
            match message:
                case PutPages(request):
                    self._check_room(session)
                    put = session.puts[request] = Put(segment, message, window(segment))
                    self._send(peer, envelope, put.grant())
                case PutPage():
                    await self._place(peer, envelope, session, message, page)
                case GetPages(request):
                    self._check_room(session)
                    session.gets[request] = Get(segment, message)
                    self._pump(peer, envelope, session, request)
                case MorePages(request, allowed):
                    if request in session.gets:
                        session.gets[request].allowed = allowed
                        self._pump(peer, envelope, session, request)
                case Stop(request):
                    self._forget(session, request)
                    self._send(peer, envelope, Stopped(request))
                case Leave():
                    self._revoke(peer, "left")
        except (RefusedError, SegmentError) as error:
            reason, positions = ("error", [])
            if isinstance(error, RefusedError):
                reason, positions = error.reason, error.positions
            log.warning("remote_refused peer=%s command=%s detail=%s", peer, type(message).__name__, error)
            self._forget(session, message.request)
            self._send(peer, envelope, RequestFailed(message.request, reason, pack(positions)))

    async def _place(
        self, peer: str, envelope: Envelope, session: Session, message: PutPage, page: memoryview | None
    ) -> None:
        put = session.puts.get(message.request)
        if put is None or page is None:
            self.counters["late_pages"] += 1  # of a request that was stopped or has failed
        elif not await asyncio.to_thread(put.place, message, page):
            self.counters["late_pages"] += 1
        else:
            self.counters["put_pages"] += 1
            self._send(peer, envelope, put.grant())
            if put.done:
                self._forget(session, message.request)

    def _pump(self, peer: str, envelope: Envelope, session: Session, request: int) -> None:
        """Send what may go. The pages are pinned until the worker's ack, so ZeroMQ may read them in their place."""
        get = session.gets[request]
        while get.may_send:
            message, page = get.next_page()
            self._send(peer, envelope, message, page.data)
            self.counters["got_pages"] += 1
        if get.done:
            self._forget(session, request)

    def _check_room(self, session: Session) -> None:
        if len(session.puts) + len(session.gets) >= MAX_REQUESTS:
            raise RefusedError("full", f"{MAX_REQUESTS} requests of one worker run")

    def _forget(self, session: Session, request: int) -> None:
        session.puts.pop(request, None)
        session.gets.pop(request, None)

    def _send(self, peer: str, envelope: Envelope, message: Message, page: memoryview | None = None) -> None:
        """Answer in the name of the segment that was asked. What can't be sent is lost; the worker's patience ends."""
        frames = encode(envelope.receiver_epoch, envelope.sender_epoch, message)
        if not self._router.send(peer, frames, page):
            self.counters["unreachable"] += 1


def window(segment: OwnedSegment) -> int:
    """Pages of one put that may be under way."""
    return max(MIN_WINDOW, WINDOW_BYTES // segment.geometry.page_bytes)


def reachable(endpoint: str) -> str:
    """What workers connect to: this host's name in place of "any address"."""
    scheme, _, address = endpoint.partition("://")
    host, colon, port = address.rpartition(":")
    return f"{scheme}://{socket.gethostname()}:{port}" if colon and host in ANY_HOST else endpoint
