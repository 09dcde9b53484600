"""KV events without gaps: the live ones, and what was missed from the replay socket."""

import asyncio
from collections.abc import AsyncGenerator

import msgspec

from kvtide.child import StackError
from shared.config import Events
from shared.messages.events import AllBlocksCleared, KVCacheEvent, KVEventBatch, decode_batch
from shared.transport import ReplayClient, Subscriber

REPLAY_TIMEOUT_S = 5.0  # until the first batch of a replay, and between two; a scheduler answers within ms
SEQUENCE_BYTES = 8

Numbered = tuple[int, KVEventBatch]


class Subscription:
    """One subscriber's place in the sequence."""

    def __init__(self, config: Events) -> None:
        self._config = config
        self._subscriber = Subscriber(config.endpoint, config.topic)
        self._expected = 0  # number of the next batch

    async def batches(self) -> AsyncGenerator[list[KVCacheEvent], None]:
        """Each batch's events in order, from the oldest that can be had; AllBlocksCleared where some are lost.

        Raises StackError when the replay endpoint doesn't answer at the start, or something else is published.
        """
        for events in await self.history():
            yield events
        while True:
            _, *frames = await self._subscriber.receive()
            number, batch = self._decode(frames)
            if number < self._expected:
                continue  # the replay has brought it already
            if number > self._expected:
                for missed, old in await self._missed():
                    if missed < number:
                        yield self._take(missed, old)
            yield self._take(number, batch)

    async def history(self) -> list[list[KVCacheEvent]]:
        """What the replay endpoint still has; nothing where there is none. Raises as `batches` does."""
        replayed = await self._replay() if self._config.replay_endpoint else []
        return [self._take(number, batch) for number, batch in replayed]

    def _take(self, number: int, batch: KVEventBatch) -> list[KVCacheEvent]:
        lost = number != self._expected
        self._expected = number + 1
        return [*([AllBlocksCleared()] if lost else []), *batch.events]

    async def _missed(self) -> list[Numbered]:
        if not self._config.replay_endpoint:
            return []
        try:
            return await self._replay()
        except StackError:
            return []  # the publisher has gone meanwhile: they count as lost

    async def _replay(self) -> list[Numbered]:
        """What the publisher still has from the expected number on: a bounded number of batches."""
        endpoint = self._config.replay_endpoint
        client = ReplayClient(endpoint, [b"", self._expected.to_bytes(SEQUENCE_BYTES, "big")])
        found: list[Numbered] = []
        try:
            async with asyncio.timeout(REPLAY_TIMEOUT_S) as deadline:
                while True:
                    _, *frames = await client.receive()
                    if not frames[-1]:
                        return found
                    found.append(self._decode(frames))
                    deadline.reschedule(asyncio.get_running_loop().time() + REPLAY_TIMEOUT_S)
        except TimeoutError:
            raise StackError(
                f"no scheduler answers at {endpoint} (events.replay_endpoint) within {REPLAY_TIMEOUT_S:g} s; "
                "is the stack running (kvtide serve), with the same --config and --set?"
            ) from None
        finally:
            client.close()

    def _decode(self, frames: list[bytes]) -> Numbered:
        try:
            number, payload = frames
            return int.from_bytes(number, "big"), decode_batch(payload)
        except (ValueError, msgspec.DecodeError):
            raise StackError(
                f"{self._config.endpoint} (events.endpoint) publishes no KV events: see docs/events.md"
            ) from None

    def close(self) -> None:
        """Close the socket."""
        self._subscriber.close()
