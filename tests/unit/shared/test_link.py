"""The wire between a peer and its scheduler: versions, epochs, hellos, silence."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shared import link
from shared.errors import ProtocolError
from shared.link import SchedulerLink, new_epoch
from shared.messages import ToGateway, ToScheduler
from shared.messages.common import PROTOCOL, Envelope, Heartbeat, HelloWanted, Message, Missed, Refused, Welcome
from shared.messages.gateway import Abort, EmitTokens, GatewayHello
from shared.transport import DamagedError, Dealer, Decoder, Router, VersionError, decode_envelope, encode

WAIT_S = 5.0


class Owner:
    """Notes what its link tells it."""

    def __init__(self) -> None:
        self.heard: asyncio.Queue[Any] = asyncio.Queue()

    def hello(self) -> Message:
        return GatewayHello("peer")

    def stats(self) -> dict[str, float]:
        return {"open": 1.0}

    def busy(self) -> bool:
        return False

    def on_scheduler(self, epoch: int) -> None:
        self.heard.put_nowait(epoch)

    def on_lost(self) -> None:
        self.heard.put_nowait("lost")

    def on_missed(self) -> None:
        self.heard.put_nowait("missed")

    def on_message(self, message: Any) -> None:
        self.heard.put_nowait(message)


class Wire:
    """A scheduler of the test's own, and a real link to it."""

    def __init__(self, folder: Path) -> None:
        endpoint = self.endpoint = f"ipc://{folder}/scheduler.sock"
        self.router = Router(endpoint)
        self.epoch = new_epoch()
        self.owner = Owner()
        self.link = SchedulerLink(endpoint, "peer", ToGateway, self.owner, on_missed=self.owner.on_missed)
        self.decode = Decoder(ToScheduler)

    def send(self, message: Message, sender: int | None = None, receiver: int | None = None, number: int = 0) -> None:
        mine = self.epoch if sender is None else sender
        yours = self.link.epoch if receiver is None else receiver
        assert self.router.send("peer", encode(mine, yours, message, number))

    async def expect(self, kind: type) -> tuple[Envelope, Any]:
        while True:
            _, frames = await asyncio.wait_for(self.router.receive(), WAIT_S)
            message = self.decode(frames[1])
            if isinstance(message, kind):
                return decode_envelope(*frames), message

    async def heard(self) -> Any:
        return await asyncio.wait_for(self.owner.heard.get(), WAIT_S)

    async def welcome(self) -> None:
        await self.expect(GatewayHello)
        self.send(Welcome("scheduler"))
        assert await self.heard() == self.epoch


@pytest.fixture
async def wire(tmp_path: Path) -> AsyncIterator[Wire]:
    wire = Wire(tmp_path)
    running = asyncio.create_task(wire.link.run())
    yield wire
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    wire.router.close()


async def test_messages_flow_after_the_welcome_and_name_both_epochs(wire: Wire) -> None:
    await wire.welcome()
    assert wire.link.send(Abort("r1"))
    envelope, message = await wire.expect(Abort)
    assert message == Abort("r1")
    assert msgspec.structs.astuple(envelope)[:3] == (PROTOCOL, wire.link.epoch, wire.epoch)
    wire.send(EmitTokens([]))
    assert await wire.heard() == EmitTokens([])


async def test_a_message_for_or_from_another_epoch_is_dropped_and_counted(wire: Wire) -> None:
    await wire.welcome()
    wire.send(EmitTokens([]), receiver=wire.link.epoch - 1)
    wire.send(EmitTokens([]), sender=wire.epoch - 1)
    wire.send(Heartbeat(5.0, {}))
    wire.send(EmitTokens([]))
    assert await wire.heard() == EmitTokens([])
    assert wire.link.counters["old_epoch"] == 2


async def test_a_new_scheduler_is_greeted_when_it_asks_and_replaces_the_old_one(wire: Wire) -> None:
    await wire.welcome()
    wire.epoch += 10
    wire.send(HelloWanted(), receiver=wire.link.epoch)
    await wire.welcome()
    assert wire.link.scheduler_epoch == wire.epoch
    wire.send(Welcome("scheduler"), sender=wire.epoch - 10)
    wire.send(EmitTokens([]))
    assert await wire.heard() == EmitTokens([])
    assert wire.link.scheduler_epoch == wire.epoch


async def test_garbage_is_dropped_and_counted(wire: Wire) -> None:
    await wire.welcome()
    for frames in ([b"x"], [b"\xff", b"\xff"], [*encode(wire.epoch, wire.link.epoch, EmitTokens([]))[:1], b"\x93"]):
        assert wire.router.send("peer", frames)
    wire.send(EmitTokens([]))
    assert await wire.heard() == EmitTokens([])
    assert wire.link.counters["malformed"] == 3


async def test_a_silent_scheduler_is_lost_and_greeted_again(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "IDLE_INTERVAL_S", 0.05)
    await wire.welcome()
    wire.send(Heartbeat(0.05, {}))
    assert await wire.heard() == "lost"
    assert not wire.link.up
    await wire.welcome()
    assert wire.link.up


async def test_a_link_whose_connection_another_process_took_makes_a_new_one(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "IDLE_INTERVAL_S", 0.05)
    monkeypatch.setattr(link, "RECONNECT_S", 1.2)  # room for two hellos
    await wire.welcome()
    wire.send(Heartbeat(0.3, {}))
    intruder = Dealer(wire.endpoint, "peer")
    await send_when_connected(intruder)
    await wire.expect(GatewayHello)
    intruder.close()
    assert await wire.heard() == "lost"
    await wire.welcome()
    assert wire.link.up
    assert wire.link.counters["reconnects"] >= 1


async def send_when_connected(dealer: Dealer) -> None:
    """A dealer sends nothing before its connection is up."""
    for _ in range(int(WAIT_S / 0.01)):
        if dealer.send(encode(1, 0, GatewayHello("peer"))):
            return
        await asyncio.sleep(0.01)
    raise TimeoutError("the intruder never got its connection")


async def test_a_refusal_for_good_ends_the_link_with_its_reason(tmp_path: Path) -> None:
    wire = Wire(tmp_path)
    running = asyncio.create_task(wire.link.run())
    await wire.expect(GatewayHello)
    wire.send(Refused("page_size 16 is not the scheduler's 64", False))
    with pytest.raises(ProtocolError, match="page_size 16"):
        await asyncio.wait_for(running, WAIT_S)
    wire.router.close()


@pytest.mark.parametrize("fields", [(1, 1, 1), (PROTOCOL + 1, 1, 1, 0)], ids=["older", "newer"])
def test_another_protocol_version_is_refused_naming_both(fields: tuple[int, ...]) -> None:
    with pytest.raises(VersionError, match=f"protocol {fields[0]}, this side {PROTOCOL}"):
        decode_envelope(msgspec.msgpack.encode(fields), b"")


def test_a_message_with_any_flipped_bit_is_refused_and_never_taken_for_another_version() -> None:
    frames = encode(2**60, 2**60 + 1, Abort("r1"), 7)
    whole = decode_envelope(*frames)
    for place, frame in enumerate(frames):
        for bit in range(8 * len(frame)):
            flipped = bytearray(frame)
            flipped[bit // 8] ^= 1 << bit % 8
            damaged = [*frames[:place], bytes(flipped), *frames[place + 1 :]]
            with contextlib.suppress(DamagedError):
                assert decode_envelope(*damaged) == whole  # the same number in other bytes
                assert place == 0


async def test_lost_messages_of_the_scheduler_are_noticed_at_the_next_one_and_it_is_told(wire: Wire) -> None:
    await wire.welcome()
    for number in (1, 2):  # a hello's welcome has number 0 here: it counts from there
        wire.send(EmitTokens([]), number=number)
        assert await wire.heard() == EmitTokens([])
    wire.send(Heartbeat(5.0, {}), number=4)
    assert await wire.heard() == "missed"
    await wire.expect(Missed)
    wire.send(EmitTokens([]), number=5)
    assert await wire.heard() == EmitTokens([])
    assert wire.link.counters["missed"] == 1


async def test_what_was_said_to_a_scheduler_that_had_given_this_peer_up_is_missed(wire: Wire) -> None:
    await wire.welcome()
    for _ in range(2):  # one for each message that it couldn't place
        wire.send(HelloWanted())
    for _ in range(2):
        await wire.expect(GatewayHello)
        wire.send(Welcome("scheduler"))
    assert await wire.heard() == "missed"
    wire.send(EmitTokens([]))
    assert await wire.heard() == EmitTokens([])


async def test_a_link_counts_what_it_sends_from_its_last_hello_on_and_hears_what_was_missed(wire: Wire) -> None:
    await wire.welcome()
    for _ in range(2):
        wire.link.send(Abort("r1"))
    numbers = [(await wire.expect(Abort))[0].number for _ in range(2)]
    assert numbers == [numbers[0], numbers[0] + 1]
    wire.send(Missed())
    assert await wire.heard() == "missed"
    wire.link.greet()
    wire.link.send(Abort("r2"))
    assert (await wire.expect(Abort))[0].number == 1


async def test_an_endpoint_in_use_is_refused_by_name(tmp_path: Path) -> None:
    endpoint = f"tcp://127.0.0.1:{_free_port()}"
    first = Router(endpoint)
    with pytest.raises(ProtocolError, match=endpoint):
        Router(endpoint)
    first.close()


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
