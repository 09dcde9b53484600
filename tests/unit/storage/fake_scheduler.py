"""The other end of a storage's link: a real socket, no policy."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from shared.link import new_epoch
from shared.messages import ToScheduler
from shared.messages.common import Fence, Heartbeat, HelloWanted, Message, Welcome
from shared.messages.storage import (
    ArchivePages,
    CommitPages,
    FindPages,
    OpenSegment,
    PrefetchPages,
    ReleasePages,
    SegmentInfo,
    StorageHello,
)
from shared.packed import pack
from shared.transport import Decoder, Router, decode_envelope, encode
from tests.unit.storage.pages import GEOMETRY, MODEL, Page

WAIT_S = 20.0  # far above what any answer takes
STORAGE = "storage-0"


class FakeScheduler:
    """Sends commands and hands out what comes back."""

    def __init__(self, endpoint: str) -> None:
        self.epoch = new_epoch()
        self.peer_epoch = 0
        self.segment: SegmentInfo | None = None
        self._router = Router(endpoint)
        self._decode = Decoder(ToScheduler)
        self._kept: list[Message] = []
        self._op_id = 0

    def close(self) -> None:
        self._router.close()

    async def restart(self) -> StorageHello:
        """Become another scheduler at the same endpoint; returns the hello it gets."""
        self.epoch = new_epoch()
        self._op_id = 0
        self._kept.clear()
        self._router.send(STORAGE, encode(self.epoch, 0, HelloWanted()))
        return await self.welcome()

    async def welcome(self, identity: str = "scheduler-0") -> StorageHello:
        """Take the storage's hello."""
        hello: StorageHello = await self.receive(lambda message: isinstance(message, StorageHello))
        self.tell(Welcome(identity))
        return hello

    def op(self) -> int:
        self._op_id += 1
        return self._op_id

    def tell(self, message: Any) -> Any:
        """Send a message, and return it."""
        assert self._router.send(STORAGE, encode(self.epoch, self.peer_epoch, message))
        return message

    async def ask(self, message: Any) -> Any:
        """Send a command and return its next answer."""
        self.tell(message)
        return await self.answer(message.op_id)

    async def answer(self, op_id: int) -> Any:
        """The next answer about an operation."""
        return await self.receive(lambda message: getattr(message, "op_id", None) == op_id)

    async def receive(self, wanted: Callable[[Any], bool], timeout_s: float = WAIT_S) -> Any:
        """The first message that is wanted; others are kept for later calls, in order."""
        for message in self._kept:
            if wanted(message):
                self._kept.remove(message)
                return message
        async with asyncio.timeout(timeout_s):
            while True:
                _, frames = await self._router.receive()
                envelope, message = decode_envelope(*frames), self._decode(frames[1])
                self.peer_epoch = envelope.sender_epoch
                if not isinstance(message, StorageHello) and envelope.receiver_epoch != self.epoch:
                    continue
                if wanted(message):
                    return message
                if not isinstance(message, Heartbeat | StorageHello):
                    self._kept.append(message)

    async def silence(self, op_id: int, timeout_s: float = 0.3) -> bool:
        """True when no answer about an operation comes for a while."""
        try:
            await self.receive(lambda message: getattr(message, "op_id", None) == op_id, timeout_s)
        except TimeoutError:
            return True
        return False

    async def open(self, *, fresh: bool = False, geometry: Any = GEOMETRY, model: bytes = MODEL) -> Any:
        answer = await self.ask(OpenSegment(self.op(), geometry, model, fresh))
        self.segment = getattr(answer, "segment", self.segment)
        return answer

    def commit(self, pages: Iterable[int], numbers: Iterable[int]) -> CommitPages:
        """CommitPages of the content by number."""
        content = [Page(n) for n in numbers]
        checksums = np.concatenate([page.checksums for page in content])
        digests = b"".join(page.digest for page in content)
        return CommitPages(self.op(), self._epoch(), pack(pages), digests, checksums.astype("<u4").tobytes())

    def release(self, pages: Iterable[int]) -> ReleasePages:
        return ReleasePages(self.op(), self._epoch(), pack(pages))

    def find(self, numbers: Iterable[int]) -> FindPages:
        return FindPages(self.op(), _digests(numbers))

    def prefetch(self, pages: Iterable[int], numbers: Iterable[int]) -> PrefetchPages:
        return PrefetchPages(self.op(), self._epoch(), pack(pages), _digests(numbers))

    def archive(self, pages: Iterable[int], numbers: Iterable[int]) -> ArchivePages:
        return ArchivePages(self.op(), self._epoch(), pack(pages), _digests(numbers))

    def fence(self) -> Fence:
        return Fence(self.op())

    def _epoch(self) -> int:
        assert self.segment is not None
        return self.segment.epoch


def _digests(numbers: Iterable[int]) -> bytes:
    return b"".join(Page(n).digest for n in numbers)
