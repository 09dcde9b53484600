"""EVENT-01: what goes out on the PUB socket, who else can read it, and what a subscriber gets again."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from kvtide.events.subscription import Subscription
from services.scheduler import event_publisher
from services.scheduler.core.events import BlockRemoved, BlockStored
from services.scheduler.event_publisher import EventPublisher
from shared.config import Events
from shared.errors import ProtocolError
from shared.messages import events as wire
from shared.packed import pack
from shared.transport import ReplayClient, Subscriber

WAIT_S = 5.0
DIGESTS = [b"\xff" * 8 + b"a" * 24, b"\x00" * 7 + b"\x05" + b"b" * 24]
STORED = BlockStored(DIGESTS, b"", pack([1, 2, 3, 4]), "CPU_PINNED")
REMOVED = BlockRemoved(DIGESTS[:1], "GPU")


class Batch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """As vLLM and SGLang write their batches."""

    ts: float
    events: list[Any]
    rank: int | None = None


class Event(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    """As vLLM and SGLang write the base of their events."""


class Removed(Event, tag="BlockRemoved"):
    block_hashes: list[bytes | int]
    medium: str | None


class Cleared(Event, tag="AllBlocksCleared"):
    pass


class Sglang(Event, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None


class Vllm(Event, tag="BlockStored"):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None


class SglangBatch(Batch):
    events: list[Sglang | Removed | Cleared]


class VllmBatch(Batch):
    events: list[Vllm | Removed | Cleared]


@pytest.fixture
def config(tmp_path: Path) -> Events:
    return Events(f"ipc://{tmp_path}/events.sock", f"ipc://{tmp_path}/replay.sock")


class Rig:
    """A publisher that serves replays."""

    def __init__(self, config: Events, epoch: int = 0) -> None:
        self.config = config
        self.publisher = EventPublisher(config, 2, epoch)
        self.task = asyncio.create_task(self.publisher.serve_replays())

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])
        self.publisher.close()


@pytest.fixture
async def rig(config: Events) -> AsyncIterator[Rig]:
    rig = Rig(config)
    yield rig
    await rig.close()


async def replayed(config: Events, start: int) -> list[tuple[int, bytes]]:
    client = ReplayClient(config.replay_endpoint, [b"", start.to_bytes(8, "big")])
    found = []
    try:
        while True:
            empty, number, payload = await asyncio.wait_for(client.receive(), WAIT_S)
            assert empty == b""
            if number == b"\xff" * 8:
                assert payload == b""
                return found
            found.append((int.from_bytes(number, "big"), payload))
    finally:
        client.close()


async def hear(subscriber: Subscriber, publisher: EventPublisher) -> list[bytes]:
    """The next message; a new subscription takes a moment, so that the publisher repeats itself until then."""
    async with asyncio.timeout(WAIT_S):
        receiving = asyncio.create_task(subscriber.receive())
        while not receiving.done():
            publisher.publish([STORED, REMOVED], 12.5)
            await asyncio.wait([receiving], timeout=0.02)
        return receiving.result()


@pytest.mark.parametrize(("batch", "stored"), [(SglangBatch, Sglang), (VllmBatch, Vllm)])
async def test_event_01_other_systems_structs_decode_it(rig: Rig, batch: Any, stored: Any) -> None:
    subscriber = Subscriber(rig.config.endpoint, "kv-events")
    topic, number, payload = await hear(subscriber, rig.publisher)
    subscriber.close()
    assert (topic, len(number)) == (b"kv-events", 8)
    assert int.from_bytes(number, "big") >= 1
    decoded = msgspec.msgpack.decode(payload, type=batch)
    assert decoded.ts == 12.5
    expected = {"lora_name": None} if stored is Vllm else {}
    assert decoded.events == [
        stored([-1, 5], None, [1, 2, 3, 4], 2, None, "CPU_PINNED", **expected),
        Removed([-1], "GPU"),
    ]


async def test_event_01_a_page_names_the_one_before_it(rig: Rig) -> None:
    rig.publisher.publish([BlockStored(DIGESTS[1:], DIGESTS[0], pack([3, 4]), "GPU")], 1.0)
    ((_, payload),) = await replayed(rig.config, 1)
    (event,) = wire.decode_batch(payload).events
    assert event == wire.BlockStored([5], -1, [3, 4], 2, None, "GPU", None)


async def test_event_01_a_new_scheduler_says_that_nothing_is_known(rig: Rig) -> None:
    ((number, payload),) = await replayed(rig.config, 0)
    assert number == 0
    assert wire.decode_batch(payload).events == [wire.AllBlocksCleared()]


async def test_event_01_a_step_without_events_takes_no_number(rig: Rig) -> None:
    rig.publisher.publish([], 1.0)
    rig.publisher.publish([REMOVED], 2.0)
    assert [number for number, _ in await replayed(rig.config, 0)] == [0, 1]


async def test_event_01_the_replay_is_bounded_in_batches_and_bytes(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_publisher, "REPLAY_BATCHES", 3)
    for _ in range(5):
        rig.publisher.publish([STORED], 1.0)
    assert [number for number, _ in await replayed(rig.config, 0)] == [3, 4, 5]
    assert [number for number, _ in await replayed(rig.config, 5)] == [5]
    monkeypatch.setattr(event_publisher, "REPLAY_BYTES", 2 * len((await replayed(rig.config, 5))[0][1]))
    rig.publisher.publish([STORED], 1.0)
    assert [number for number, _ in await replayed(rig.config, 0)] == [5, 6]


async def test_event_01_a_long_replay_to_a_client_that_reads_late_is_whole(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.transport.HIGH_WATER_MARK", 10)
    for _ in range(3000):
        rig.publisher.publish([STORED], 1.0)
    assert [number for number, _ in await replayed(rig.config, 0)] == list(range(3001))


async def test_event_01_a_malformed_replay_request_hurts_nobody(rig: Rig) -> None:
    context = zmq.asyncio.Context()
    for kind, request in ((zmq.REQ, [b"five"]), (zmq.DEALER, [b"\x00" * 8]), (zmq.DEALER, [b"", b"", b""])):
        socket = context.socket(kind)
        socket.setsockopt(zmq.LINGER, 1000)
        socket.connect(rig.config.replay_endpoint)
        await socket.send_multipart(request)
        socket.close()
    assert len(await replayed(rig.config, 0)) == 1
    context.term()


async def test_event_01_a_req_socket_without_a_name_is_answered(rig: Rig) -> None:
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.REQ)
    socket.connect(rig.config.replay_endpoint)
    await socket.send((0).to_bytes(8, "big"))
    number, _ = await asyncio.wait_for(socket.recv_multipart(), WAIT_S)
    assert number == bytes(8)
    socket.close()
    context.term()


async def test_event_01_a_subscriber_that_does_not_read_holds_nobody_up_and_catches_up(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.transport.HIGH_WATER_MARK", 5)  # of the subscriber; the publisher's is EVENT_MARK
    subscription = Subscription(rig.config)
    batches = subscription.batches()
    assert await asyncio.wait_for(anext(batches), WAIT_S) == [wire.AllBlocksCleared()]
    big = BlockStored([bytes([n % 251]) * 32 for n in range(500)], b"", pack(range(1000)), "GPU")
    for number in range(4000):  # far more than the queues on both sides hold
        rig.publisher.publish([big if number else STORED, REMOVED], 1.0 + number)
        if number % 200 == 0:
            await asyncio.sleep(0)
    seen = 0
    async with asyncio.timeout(60):
        while seen < 2 * 4000:
            events = await anext(batches)
            assert wire.AllBlocksCleared() not in events
            seen += len(events)
            rig.publisher.publish([REMOVED], 1e9 + seen)  # what makes a gap visible is the batch after it
    await batches.aclose()
    subscription.close()


async def test_event_01_a_new_scheduler_is_told_from_repeated_numbers(rig: Rig) -> None:
    subscription = Subscription(rig.config)
    batches = subscription.batches()
    rig.publisher.publish([STORED], 1.0)
    assert await asyncio.wait_for(anext(batches), WAIT_S) == [wire.AllBlocksCleared()]
    assert len(await asyncio.wait_for(anext(batches), WAIT_S)) == 1
    await rig.close()
    second = Rig(rig.config, epoch=10**9)
    following = asyncio.ensure_future(anext(batches))
    async with asyncio.timeout(WAIT_S):
        while not following.done():
            second.publisher.publish([REMOVED], 2.0)
            await asyncio.wait([following], timeout=0.02)
    assert following.result()[-1] == wire.AllBlocksCleared()
    assert await asyncio.wait_for(anext(batches), WAIT_S) == [wire.BlockRemoved([-1], "GPU")]
    await batches.aclose()
    subscription.close()
    await second.close()


async def test_event_01_an_endpoint_that_is_taken_is_refused(config: Events) -> None:
    first = EventPublisher(Events("tcp://127.0.0.1:*", ""), 2, 0)
    with pytest.raises(ProtocolError, match=r"can't bind ipc:///nowhere/events\.sock"):
        EventPublisher(Events(config.endpoint, "ipc:///nowhere/events.sock"), 2, 0)
    EventPublisher(config, 2, 0).close()  # the first socket was closed again
    assert not list(Path(config.endpoint.removeprefix("ipc://")).parent.iterdir())
    first.close()
