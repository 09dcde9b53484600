"""The socket to one storage's page server. The event loop owns it; streams talk through `Request`s."""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from shared.errors import ProtocolError, SegmentError
from shared.messages import ToPageClient
from shared.messages.common import Message
from shared.messages.pages import Alive, Join, Joined, Leave, NotJoined
from shared.messages.storage import SegmentInfo
from shared.transport import Counters, Dealer, Decoder, decode_envelope, encode

JOIN_S = 10.0  # until a storage that doesn't answer is given up; the scheduler asks again
JOIN_RETRY_S = 0.2  # between two Joins
TELL_AGAIN_S = 5.0  # that a session has ended, until the scheduler has it joined again: it does so within milliseconds

log = logging.getLogger("kvtide.pages")


class Unsent:
    """In a request's queue: a message of it couldn't be sent."""


Reply = tuple[Any, memoryview | None]  # a message, and a page's bytes where ZeroMQ received them


class Request:
    """A put or a get: its number, and what came for it. Credits bound its queue."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._replies: SimpleQueue[Reply] = SimpleQueue()

    def put(self, message: Any, page: memoryview | None = None) -> None:
        """Called by the link."""
        self._replies.put((message, page))

    def get(self, timeout_s: float) -> Reply | None:
        """The next reply; None when none comes in time."""
        with contextlib.suppress(Empty):
            return self._replies.get(timeout=timeout_s)
        return None


class PageLink:
    """One DEALER. `begin`, `post` and `end` may be called from any thread, the rest in the event loop."""

    def __init__(self, info: SegmentInfo, identity: str, epoch: int, on_lost: Callable[[], None]) -> None:
        """identity and epoch: this process's. on_lost: called when the storage has ended the session, and again until
        `join` is called."""
        self.joined: Joined | None = None  # what the storage said; None before, and once it has ended the session
        self.counters = Counters()
        self._info = info
        self._identity = identity
        self._epoch = epoch
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._dealer = Dealer(info.pages_endpoint, f"{identity}.{epoch}.{info.epoch}")
        self._decode = Decoder(ToPageClient)
        self._numbers = itertools.count(1)
        self._requests: dict[int, Request] = {}
        self._answered = asyncio.Event()  # the storage has answered a Join
        self._joins = 0  # Joined that have come
        self._joining = False
        self._tell_s: float | None = None  # when to say again that the session has ended
        self._closed = False
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._stay())]

    async def join(self) -> Joined:
        """Return what the storage says when it knows this process. What it said earlier doesn't count: it may have
        ended the session unheard. Raises SegmentError after JOIN_S."""
        self._joining, self._tell_s = True, None
        try:
            return await self._ask_to_join(self._joins)
        finally:
            self._joining = False

    async def _ask_to_join(self, joins: int) -> Joined:
        deadline = time.monotonic() + JOIN_S
        while self._joins == joins or self.joined is None:
            if self._closed or time.monotonic() > deadline:
                raise SegmentError(
                    f"{self._info.storage_id} doesn't take this worker at {self._info.pages_endpoint} within "
                    f"{JOIN_S:g} s: check storage.pages_endpoint and the network"
                )
            self._answered.clear()
            self._send(Join(self._identity))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._answered.wait(), JOIN_RETRY_S)
        return self.joined

    def begin(self, make: Callable[[int], Message]) -> Request:
        """Send a request made from its number."""
        request = Request(next(self._numbers))
        self._requests[request.number] = request
        self.post(make(request.number), request=request)
        return request

    def post(self, message: Message, page: memoryview | None = None, *, request: Request) -> None:
        """Send more of a request. page: isn't copied, so its bytes must stay until the storage has answered."""
        try:
            self._loop.call_soon_threadsafe(self._send_for, request, message, page)
        except RuntimeError:  # the loop is closed
            request.put(Unsent())

    def end(self, request: Request) -> None:
        """What still comes for it is dropped."""
        self._requests.pop(request.number, None)

    def close(self) -> None:
        """Say good-bye and close the socket. Requests that still run get Unsent."""
        if not self._closed:
            self._closed = True
            self._send(Leave())
            for task in self._tasks:
                task.cancel()
            self._lose(Unsent())
            self._dealer.close()

    async def _stay(self) -> None:
        while True:
            await asyncio.sleep(self.joined.alive_s if self.joined else JOIN_RETRY_S)
            if self.joined:
                self._send(Alive())
            elif self._tell_s is not None and time.monotonic() >= self._tell_s:
                self._tell_lost()

    def _tell_lost(self) -> None:
        self._tell_s = time.monotonic() + TELL_AGAIN_S
        self._on_lost()

    async def _receive(self) -> None:
        while True:
            frames, page = await self._dealer.receive_page()
            try:
                if len(frames) != 2:
                    raise ProtocolError(f"a message has 2 frames and maybe a page, not {len(frames)}")
                envelope, message = decode_envelope(*frames), self._decode(frames[1])
            except ProtocolError as error:
                self.counters.malformed(self._info.storage_id, error)
                continue
            if (envelope.sender_epoch, envelope.receiver_epoch) != (self._info.epoch, self._epoch):
                self.counters["old_epoch"] += 1
                continue
            self._take(message, page)

    def _take(self, message: Any, page: memoryview | None) -> None:
        match message:
            case Joined():
                self.joined = message
                self._joins += 1
                self._answered.set()
            case NotJoined():
                was_joined, self.joined = self.joined is not None, None
                self._answered.set()
                self._lose(message)
                if was_joined:
                    log.warning("remote_session_lost storage=%s", self._info.storage_id)
                    if not self._joining:  # else the end of it is told
                        self._tell_lost()
            case _:
                request = self._requests.get(message.request)
                if request is not None:
                    request.put(message, page)

    def _lose(self, message: Any) -> None:
        for request in list(self._requests.values()):
            request.put(message)

    def _send_for(self, request: Request, message: Message, page: memoryview | None) -> None:
        if self._closed or not self._send(message, page):
            request.put(Unsent())

    def _send(self, message: Message, page: memoryview | None = None) -> bool:
        return self._dealer.send(encode(self._epoch, self._info.epoch, message), page)
