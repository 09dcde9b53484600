"""The other end of a worker's link, and what tests say through it."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from services.gpu_worker.engine import Engine
from services.storage.page_server import PageServer
from shared.link import new_epoch
from shared.messages import ToScheduler
from shared.messages.common import Heartbeat, HelloWanted, Message, Welcome
from shared.messages.storage import Holder, SegmentInfo
from shared.messages.worker import (
    DropSegment,
    LoadPages,
    MapSegment,
    RunStep,
    Sampling,
    SegmentMapped,
    StepDone,
    StepItem,
    WorkerHello,
    WriteDone,
    WritePages,
)
from shared.packed import pack
from shared.segments import OwnedSegment
from shared.transport import Decoder, Router, decode_envelope, encode

WAIT_S = 20.0  # far above what any answer takes
PAGE = 4
LAYERS = 3
VOCABULARY = 96
GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=0, choice=0, logprobs=VOCABULARY)


class FakeScheduler:
    """The other end of the worker's link, without any policy."""

    def __init__(self, endpoint: str) -> None:
        self.epoch = new_epoch()
        self.peer_epoch = 0
        self.heartbeats: list[Heartbeat] = []
        self._router = Router(endpoint)
        self._decode = Decoder(ToScheduler)
        self._kept: list[Message] = []
        self._op_id = 0

    def close(self) -> None:
        self._router.close()

    def restart(self) -> None:
        """Become another scheduler at the same endpoint: a new epoch, nothing known."""
        self.epoch = new_epoch()
        self._op_id = 0
        self._kept.clear()
        self._router.send("worker", encode(self.epoch, 0, HelloWanted()))

    async def welcome(self, timeout_s: float = WAIT_S) -> WorkerHello:
        """Take the worker's hello."""
        hello = await self.receive(lambda message: isinstance(message, WorkerHello), timeout_s)
        self.tell(Welcome("scheduler-0"))
        return hello

    def op(self) -> int:
        self._op_id += 1
        return self._op_id

    def tell(self, message: Message, sender: int = 0, receiver: int = 0) -> None:
        """Send, under other epochs than the present ones where they are given."""
        frames = encode(sender or self.epoch, receiver or self.peer_epoch, message)
        assert self._router.send("worker", frames)

    async def answer(self, op_id: int) -> Any:
        """The next answer about an operation."""
        return await self.receive(lambda message: getattr(message, "op_id", None) == op_id)

    async def ask(self, message: Any) -> Any:
        """Send a command and return its answer."""
        self.tell(message)
        return await self.answer(message.op_id)

    async def receive(self, wanted: Callable[[Message], bool], timeout_s: float = WAIT_S) -> Any:
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
                if isinstance(message, Heartbeat):
                    self.heartbeats.append(message)
                if not isinstance(message, WorkerHello) and envelope.receiver_epoch != self.epoch:
                    continue
                if wanted(message):
                    return message
                if not isinstance(message, Heartbeat | WorkerHello):
                    self._kept.append(message)

    async def silence(self, op_id: int, timeout_s: float = 0.3) -> bool:
        """True when no answer about an operation comes for a while."""
        try:
            await self.receive(lambda message: getattr(message, "op_id", None) == op_id, timeout_s)
        except TimeoutError:
            return True
        return False


@dataclass
class Stack:
    """A worker that has said hello, with a host pool mapped."""

    scheduler: FakeScheduler
    engine: Engine
    hello: WorkerHello
    segment: OwnedSegment
    info: SegmentInfo
    holders: Callable[[], list[Holder]]  # who the storage says may write
    server: PageServer  # beside the segment; idle when the worker maps it

    async def rejoin(self) -> None:
        """What the scheduler does when a storage has ended a worker's session."""
        drop = DropSegment(self.scheduler.op(), self.info.storage_id, self.info.epoch)
        await self.scheduler.ask(drop)
        mapped = await self.scheduler.ask(MapSegment(self.scheduler.op(), self.info))
        assert isinstance(mapped, SegmentMapped)

    def fill(self, pages: list[int], seed: int = 0) -> None:
        """Random K/V in device pages."""
        generator = torch.Generator().manual_seed(seed)
        for layer in range(LAYERS):
            for buffer in self.engine.pool.layer_buffers(layer):
                for page in pages:
                    rows = buffer[page * PAGE : (page + 1) * PAGE]
                    rows.copy_(torch.randn(rows.shape, generator=generator))

    def bytes_of(self, page: int) -> bytes:
        """All bytes of a device page."""
        slots = slice(page * PAGE, (page + 1) * PAGE)
        buffers = [buffer for layer in range(LAYERS) for buffer in self.engine.pool.layer_buffers(layer)]
        return b"".join(buffer[slots].numpy().tobytes() for buffer in buffers)

    def write(self, device: list[int], host: list[int]) -> WritePages:
        return WritePages(self.scheduler.op(), self.info.storage_id, self.info.epoch, pack(device), pack(host))

    def load(self, host: list[int], device: list[int]) -> LoadPages:
        info = self.info
        return LoadPages(
            self.scheduler.op(), info.storage_id, info.epoch, pack(host), pack(device), b"".join(map(digest, host))
        )

    def name(self, host: list[int], done: WriteDone) -> None:
        """What CommitPages does."""
        checksums = np.frombuffer(done.checksums, np.uint32).reshape(len(host), -1)
        self.segment.set_names(np.array(host, np.int32), b"".join(map(digest, host)), checksums)

    async def back_up(self, device: list[int], host: list[int]) -> None:
        """Write device pages into host pages and name them."""
        done = await self.scheduler.ask(self.write(device, host))
        assert isinstance(done, WriteDone)
        self.name(host, done)

    async def step(self, items: list[StepItem], wait_for: list[int] | None = None) -> StepDone:
        done = await self.scheduler.ask(RunStep(self.scheduler.op(), items, wait_for or []))
        assert isinstance(done, StepDone)
        return done


def digest(page: int) -> bytes:
    """A stand-in for the page hash of a host page's content."""
    return page.to_bytes(32, "little")


def item(
    start: int, tokens: list[int], pages: list[int], *, row: int = 1, first_page: int = 0, sample: bool = True
) -> StepItem:
    """A request's part of a step."""
    return StepItem(row, start, pack(tokens), first_page, pack(pages), GREEDY if sample else None)
