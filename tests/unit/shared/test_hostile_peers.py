"""Every socket hears random bytes, wrong tags, wrong sizes and old epochs: nothing ends, each message is counted.

A few thousand messages here; KVTIDE_FUZZ=100000 sends so many to each socket.
"""

import asyncio
import gc
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.scheduler.service import SchedulerService
from services.storage.page_server import PageServer
from shared.config import Config, Run
from shared.link import SchedulerLink
from shared.messages import ToGateway, ToStorage, ToWorker
from shared.messages.common import Cancel, Fence, Heartbeat, Message, Refused, Welcome
from shared.messages.gateway import Abort, GatewayHello, Status, StatusWanted
from shared.messages.pages import Join, Stop
from shared.messages.storage import FindPages
from shared.messages.worker import DropSegment
from shared.transport import Counters, Dealer, Router, decode_envelope, encode
from tests.unit.shared.hostile import hostile

COUNT = int(os.environ.get("KVTIDE_FUZZ", "3000"))
BURST = 200  # messages on their way at once: below every queue's bound, so that none is dropped before it is heard
PATIENCE_S = 60.0
BEAT_S = 2.0  # between two heartbeats of the hostile peer: who is silent for 15 s is lost, and its connection made anew
GROWTH = 1000  # objects that may be left after all of them: less than one for each message
EPOCH = time.time_ns()
IDENTITY = "gateway-0"


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvtide-") as made:  # a socket's path has at most 107 bytes
        yield Path(made)


async def pour(
    frames: Iterator[list[bytes]], send: Callable[[list[bytes]], bool], counters: Counters, beat: list[bytes]
) -> None:
    """Send everything, and a well-formed `beat` now and then; each message must be counted, and nothing of it kept."""
    deadline, beat_s = time.monotonic() + PATIENCE_S + COUNT / 500, 0.0
    before, objects, sent = dropped(counters), len(gc.get_objects()), 0

    async def wait(behind: int) -> None:
        while sent - (dropped(counters) - before) > behind:
            assert time.monotonic() < deadline, f"{dropped(counters) - before} of {sent} messages were counted"
            await asyncio.sleep(0.001)

    for each in frames:
        if time.monotonic() > beat_s:
            assert send(beat)
            beat_s = time.monotonic() + BEAT_S
        assert send(each)
        sent += 1
        await wait(BURST)
    await wait(0)
    assert sent == COUNT == dropped(counters) - before
    gc.collect()
    assert len(gc.get_objects()) - objects < GROWTH


def dropped(counters: Counters) -> int:
    """Messages that were dropped for what they are."""
    return counters["malformed"] + counters["old_epoch"]


async def connected(dealer: Dealer, first: list[bytes]) -> list[bytes]:
    """Send the first message; returns its answer."""
    for _ in range(500):
        if dealer.send(first):
            break
        await asyncio.sleep(0.02)
    async with asyncio.timeout(PATIENCE_S):
        return await dealer.receive()


async def test_a_scheduler_outlives_hostile_peers(folder: Path) -> None:
    config = Config(run=Run(folder=str(folder)))
    service, stop = SchedulerService(config), asyncio.Event()
    running = asyncio.create_task(service.run(stop))
    dealer = Dealer(config.scheduler_endpoint, IDENTITY)
    try:
        await connected(dealer, encode(EPOCH, 0, GatewayHello(IDENTITY)))
        samples: list[Message] = [GatewayHello(IDENTITY), Heartbeat(1.0, {}), StatusWanted(), Abort("r")]
        beat = encode(EPOCH, service.epoch, Heartbeat(5.0, {}))
        await pour(hostile(1, COUNT, samples, EPOCH, service.epoch), dealer.send, service.counters, beat)
        assert not running.done()
        assert [peer["up"] for peer in service.status()["peers"]] == [True]
    finally:
        dealer.close()
        stop.set()
        await running


async def test_a_page_server_outlives_hostile_workers(folder: Path) -> None:
    server = PageServer(f"ipc://{folder}/pages", lambda epoch: None)
    running = asyncio.create_task(server.run())
    dealer = Dealer(server.endpoint, "worker-0.1.1")
    try:
        await connected(dealer, encode(EPOCH, 1, Join("worker-0")))
        frames = (each for each in hostile(2, 2 * COUNT, [Join("worker-0"), Stop(1)], EPOCH, 1) if not old(each))
        messages = (each for each, _ in zip(frames, range(COUNT), strict=False))
        await pour(messages, dealer.send, server.counters, encode(EPOCH, 1, Join("worker-0")))
        assert not running.done()
        assert server.holders() == []
    finally:
        dealer.close()
        running.cancel()
        await asyncio.wait({running})
        server.close()


def old(frames: list[bytes]) -> bool:
    """A page server asks the sender of an old epoch to join again, and counts nothing."""
    return frames[1:] == encode(0, 0, Heartbeat(1.0, {}))[1:]


class Owner:
    """A service with a link to a scheduler that lies."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def hello(self) -> Message:
        return GatewayHello(IDENTITY)

    def stats(self) -> dict[str, float]:
        return {}

    def busy(self) -> bool:
        return True

    def on_scheduler(self, epoch: int) -> None:
        """Nothing to forget."""

    def on_lost(self) -> None:
        """Nothing to stop."""

    def on_message(self, message: Any) -> None:
        self.heard.append(message)


@pytest.mark.parametrize(
    ("union", "samples"),
    [
        (ToGateway, [Status(b"{}")]),
        (ToWorker, [Fence(1), Cancel(2, 1), DropSegment(3, "storage-0", 1)]),
        (ToStorage, [Fence(1), Cancel(2, 1), FindPages(3, bytes(64))]),
    ],
    ids=["gateway", "worker", "storage"],
)
async def test_a_link_outlives_a_hostile_scheduler(folder: Path, union: Any, samples: list[Message]) -> None:
    endpoint, owner = f"ipc://{folder}/scheduler", Owner()
    router = Router(endpoint)
    tested = SchedulerLink(endpoint, IDENTITY, union, owner)
    running = asyncio.create_task(tested.run())
    try:
        async with asyncio.timeout(PATIENCE_S):
            _, frames = await router.receive()
        assert decode_envelope(*frames).sender_epoch == tested.epoch
        router.send(IDENTITY, encode(EPOCH, tested.epoch, Welcome("scheduler-0")))
        lies = [*samples, Welcome("x"), Refused("no", False), Heartbeat(1.0, {})]
        messages = hostile(3, COUNT, lies, EPOCH, tested.epoch)
        beat = encode(EPOCH, tested.epoch, Heartbeat(5.0, {}))
        await pour(messages, lambda frames: router.send(IDENTITY, frames), tested.counters, beat)
        assert not running.done()
        assert owner.heard == []
    finally:
        running.cancel()
        await asyncio.wait({running})
        router.close()
