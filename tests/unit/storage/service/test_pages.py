"""A storage with a page server: what it tells the scheduler, and a put that is too late."""

import asyncio

import pytest
from msgspec.structs import replace

from services.storage.page_server_requests import GRANT_S, Put
from shared.config import Config
from shared.messages import ToPageClient
from shared.messages.common import Message
from shared.messages.pages import Join, Joined, Leave, NotJoined, PutPage, PutPages
from shared.messages.storage import Holder, PeerExited
from shared.packed import pack
from shared.segments import OwnedSegment
from shared.transport import Dealer, Decoder, decode_envelope, encode
from tests.unit.storage.fake_scheduler import WAIT_S, FakeScheduler
from tests.unit.storage.pages import Page
from tests.unit.storage.service.conftest import Stack, running

EPOCH = 5


@pytest.fixture
def config(config: Config) -> Config:
    return replace(config, storage=replace(config.storage, pages_endpoint=f"ipc://{config.run_folder}/pages.sock"))


class Client:
    """A worker's socket."""

    def __init__(self, endpoint: str, segment_epoch: int, epoch: int = EPOCH) -> None:
        self._dealer = Dealer(endpoint, f"worker-0.{epoch}")
        self._epochs = (epoch, segment_epoch)
        self._decode = Decoder(ToPageClient)

    async def ask(self, message: Message) -> Message:
        """Send a message, as soon as there is a connection, and return what comes."""
        async with asyncio.timeout(WAIT_S):
            while not self._dealer.send(encode(*self._epochs, message)):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            frames = await self._dealer.receive()
        assert decode_envelope(*frames).receiver_epoch == self._epochs[0]
        answer: Message = self._decode(frames[1])
        return answer

    def tell(self, message: Message) -> None:
        assert self._dealer.send(encode(*self._epochs, message))

    def close(self) -> None:
        self._dealer.close()


async def test_a_remote_worker_is_a_holder_until_it_leaves(config: Config, scheduler: FakeScheduler) -> None:
    async with running(config) as service:
        assert (await scheduler.welcome()).segment is None
        segment = (await scheduler.open()).segment
        assert segment.pages_endpoint == config.storage.pages_endpoint
        client = Client(segment.pages_endpoint, segment.epoch)
        assert isinstance(await client.ask(Join("worker-0")), Joined)
        hello = await scheduler.restart()
        assert hello.holders == [Holder("worker-0", EPOCH, segment.epoch, 1)]
        assert hello.segment == segment
        client.tell(Leave())
        exited = await scheduler.receive(lambda message: isinstance(message, PeerExited))
        assert exited == PeerExited("worker-0", EPOCH, segment.epoch, 1)
        assert service.pages is not None
        assert service.pages.holders() == []
        client.close()


async def test_a_session_s_end_is_told_though_the_worker_has_joined_again(stack: Stack) -> None:
    segment = stack.scheduler.segment
    assert segment is not None
    client = Client(segment.pages_endpoint, segment.epoch)
    first = await client.ask(Join("worker-0"))
    stack.service.leases[0].watch()  # sees it
    client.tell(Leave())
    second = await client.ask(Join("worker-0"))
    assert isinstance(first, Joined)
    assert isinstance(second, Joined)
    assert second.session > first.session
    exited = await stack.scheduler.receive(lambda message: isinstance(message, PeerExited))
    assert exited == PeerExited("worker-0", EPOCH, segment.epoch, first.session)
    client.close()


async def test_a_successor_ends_its_predecessors_session(stack: Stack) -> None:
    segment = stack.scheduler.segment
    assert segment is not None
    old, new = (Client(segment.pages_endpoint, segment.epoch, epoch) for epoch in (EPOCH, EPOCH + 1))
    assert isinstance(await old.ask(Join("worker-0")), Joined)
    assert isinstance(await new.ask(Join("worker-0")), Joined)
    assert isinstance(await old.ask(PutPages(1, pack([3]))), NotJoined)
    old.close()
    new.close()


async def test_another_segments_epoch_is_answered_with_not_joined(stack: Stack) -> None:
    segment = stack.scheduler.segment
    assert segment is not None
    client = Client(segment.pages_endpoint, segment.epoch - 1)
    assert isinstance(await client.ask(Join("worker-0")), NotJoined)
    client.close()


async def test_a_page_is_not_placed_after_its_grant_has_ended(stack: Stack) -> None:
    segment, now = stack.service.leases[0].pool.current, 100.0
    assert isinstance(segment, OwnedSegment)
    put = Put(segment, PutPages(1, pack([3, 4])), window=2, clock=lambda: now)
    first = put.grant()
    assert (first.placed, first.allowed) == (0, 2)
    page = Page(1)
    message = PutPage(1, first.grant, 0, page.checksums.astype("<u4").tobytes())
    assert put.place(message, memoryview(page.bytes))
    second = put.grant()
    assert second.placed == 1
    now += GRANT_S
    assert put.over
    assert not put.place(replace(message, position=1, grant=second.grant), memoryview(page.bytes))
    assert stack.worker.pages_array[3].tobytes() == page.bytes
    assert not stack.worker.pages_array[4].any()
