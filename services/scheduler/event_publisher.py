"""KV events on a PUB socket, and the last of them again on request (EVENT-01).

A message is three frames: topic, sequence number (8 bytes, big-endian), msgpack batch. Who sees a gap sends the first
number that it lacks to the replay socket (a DEALER, after an empty frame) and gets [number, batch] for each one that
is still there, then [-1, b""]. A scheduler begins with AllBlocksCleared, numbered by its epoch: higher than all numbers
of the one before, so that a restart looks like a gap and not like old numbers.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterable

from services.scheduler.core import events as core
from shared.config import Events
from shared.errors import ProtocolError
from shared.messages.events import (
    AllBlocksCleared,
    AnyEvent,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    block_hash,
    encode_batch,
)
from shared.packed import unpack_list
from shared.transport import Publisher, ReplayRouter

REPLAY_BATCHES = 10_000  # kept for replay, as SGLang and vLLM do: minutes of a busy scheduler
REPLAY_BYTES = 64 * 2**20  # kept for replay; a batch is 1 to 10 KB
REPLAY_TIMEOUT_S = 5.0  # a client that doesn't read its replay for this long loses the rest, as others wait
REPLAY_PAUSE_S = 0.01  # until a full queue is tried again
REPLAY_BURST = 64  # batches sent in one go: about 1 ms, less than a step
NS_PER_BATCH = 1000  # no scheduler publishes a million batches a second
SEQUENCE_BYTES = 8
END_OF_REPLAY = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)

log = logging.getLogger("kvtide.scheduler.events")


class EventPublisher:
    """Publishes what the core says. It never waits for a subscriber."""

    def __init__(self, config: Events, page_size: int, epoch: int) -> None:
        """Bind. epoch: ns since 1970. Raises ProtocolError when an endpoint can't be bound."""
        self._topic = config.topic.encode()
        self._page_size = page_size
        self._sequence = epoch // NS_PER_BATCH  # of the next batch
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._publisher = Publisher(config.endpoint)
        try:
            self._replay = ReplayRouter(config.replay_endpoint) if config.replay_endpoint else None
        except ProtocolError:
            self._publisher.close()
            raise
        self._send(KVEventBatch(time.time(), [AllBlocksCleared()]))

    def publish(self, events: Iterable[core.CacheEvent], now: float) -> None:
        """Send what one `handle` has changed, if anything. now: seconds since 1970."""
        batch: list[AnyEvent] = [self._on_the_wire(event) for event in events]
        if batch:
            self._send(KVEventBatch(now, batch))

    def _on_the_wire(self, event: core.CacheEvent) -> AnyEvent:
        hashes = [block_hash(digest) for digest in event.digests]
        if isinstance(event, core.BlockRemoved):
            return BlockRemoved(hashes, event.medium)
        parent = block_hash(event.parent) if event.parent else None
        return BlockStored(hashes, parent, unpack_list(event.tokens), self._page_size, medium=event.medium)

    def _send(self, batch: KVEventBatch) -> None:
        payload = encode_batch(batch)
        self._publisher.send([self._topic, _frame(self._sequence), payload])
        self._kept.append((self._sequence, payload))
        self._kept_bytes += len(payload)
        self._sequence += 1
        while len(self._kept) > REPLAY_BATCHES or self._kept_bytes > REPLAY_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])

    async def serve_replays(self) -> None:
        """Answer replay requests, one after the other, until cancelled."""
        while self._replay is not None:
            client, frames = await self._replay.receive_request()
            if len(frames) != 2 or frames[0] or len(frames[1]) != SEQUENCE_BYTES:
                log.warning("replay_refused frames=%d: send an empty frame and %d bytes", len(frames), SEQUENCE_BYTES)
                continue
            start = int.from_bytes(frames[1], "big")
            kept = [(_frame(number), payload) for number, payload in self._kept if number >= start]
            whole = await self._answer(self._replay, client, [*kept, (END_OF_REPLAY, b"")])
            log.info("replay start=%d batches=%d whole=%s", start, len(kept), whole)

    async def _answer(self, replay: ReplayRouter, client: bytes, batches: list[tuple[bytes, bytes]]) -> bool:
        deadline = time.monotonic() + REPLAY_TIMEOUT_S
        for index, (number, payload) in enumerate(batches):
            while not replay.answer(client, [b"", number, payload]):
                if time.monotonic() > deadline:
                    return False
                await asyncio.sleep(REPLAY_PAUSE_S)
            if index % REPLAY_BURST == REPLAY_BURST - 1:
                await asyncio.sleep(0)
        return True

    def close(self) -> None:
        """Close the sockets."""
        self._publisher.close()
        if self._replay is not None:
            self._replay.close()


def _frame(number: int) -> bytes:
    return number.to_bytes(SEQUENCE_BYTES, "big")
