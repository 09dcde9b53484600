"""The shell round the core: who is greeted and who is refused."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from services.scheduler.service import SchedulerService
from shared.config import Config, Run
from shared.messages import ToStorage
from shared.messages.common import Fence, Heartbeat, Message, Missed, Refused, Welcome
from shared.messages.storage import BackendInfo, StorageHello, Superseded
from shared.transport import Dealer, Decoder, decode_envelope, encode

IDENTITY = "storage-0"
BEAT_S = 0.05
TRIES = 200


@pytest_asyncio.fixture
async def dealer(tmp_path: Path) -> AsyncIterator[Dealer]:
    """A storage's socket to a running scheduler."""
    config = Config(run=Run(folder=str(tmp_path)))
    stop = asyncio.Event()
    running = asyncio.create_task(SchedulerService(config).run(stop))
    dealer = Dealer(config.scheduler_endpoint, IDENTITY)
    yield dealer
    dealer.close()
    stop.set()
    await running


async def greet(dealer: Dealer, epoch: int) -> tuple[Message, int]:
    """Say hello as a process of this epoch; returns Welcome or Refused, and the scheduler's epoch."""
    hello = StorageHello(IDENTITY, BackendInfo("l3", "memory", False, True, 0), None, [], 1000, 8)
    frames = encode(epoch, 0, hello)
    for _ in range(TRIES):
        if dealer.send(frames):
            break
        await asyncio.sleep(BEAT_S)
    decode = Decoder(ToStorage)
    while True:
        frames = await dealer.receive()
        message = decode(frames[1])
        if isinstance(message, Welcome | Refused):
            return message, decode_envelope(*frames).sender_epoch


async def test_an_older_process_is_refused_while_a_newer_one_is_heard(dealer: Dealer) -> None:
    assert isinstance((await greet(dealer, epoch=2))[0], Welcome)
    assert isinstance((await greet(dealer, epoch=1))[0], Refused)


async def test_an_older_epoch_is_welcome_once_the_newer_process_is_lost(dealer: Dealer) -> None:
    """A machine whose clock was set back may restart its services."""
    answer, scheduler_epoch = await greet(dealer, epoch=2)
    assert isinstance(answer, Welcome)
    dealer.send(encode(2, scheduler_epoch, Heartbeat(BEAT_S, {})))
    first, _ = await greet(dealer, epoch=1)
    assert isinstance(first, Refused)
    for _ in range(TRIES):
        answer, _ = await greet(dealer, epoch=1)
        if isinstance(answer, Welcome):
            break
        await asyncio.sleep(BEAT_S)
    assert isinstance(answer, Welcome)


async def test_a_storage_whose_messages_were_lost_hears_it_and_is_asked_again(dealer: Dealer) -> None:
    _, scheduler_epoch = await greet(dealer, epoch=2)
    dealer.send(encode(2, scheduler_epoch, Heartbeat(5.0, {}), 1))
    dealer.send(encode(2, scheduler_epoch, Heartbeat(5.0, {}), 3))  # the lost one was to answer the Fence
    answers = await received(dealer, Missed, Fence)
    assert [type(each) for each in answers] == [Fence, Missed, Fence]
    assert answers[0] == answers[2]


async def received(dealer: Dealer, *kinds: type) -> list[Message]:
    """Messages of these kinds, until the last of them has come after the others."""
    decode, found = Decoder(ToStorage), []
    async with asyncio.timeout(TRIES * BEAT_S):
        while not (found and kinds[0] in map(type, found) and type(found[-1]) is kinds[-1]):
            frames = await dealer.receive()
            message = decode(frames[1])
            if isinstance(message, kinds):
                found.append(message)
    return found


async def test_a_scheduler_whose_lease_is_another_s_ends(tmp_path: Path) -> None:
    config = Config(run=Run(folder=str(tmp_path)))
    running = asyncio.create_task(SchedulerService(config, "scheduler-0").run(asyncio.Event()))
    dealer = Dealer(config.scheduler_endpoint, IDENTITY)
    answer, scheduler_epoch = await greet(dealer, epoch=2)
    assert answer == Welcome("scheduler-0")
    dealer.send(encode(2, scheduler_epoch, Superseded(scheduler_epoch + 1)))
    await asyncio.wait_for(running, TRIES * BEAT_S)
    dealer.close()
