"""The scheduler's shell round the core, on virtual time: what `services.scheduler.service` does, without sockets."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtide.simulation.checks import check_progress
from kvtide.simulation.process import Pausable
from kvtide.simulation.subscriber import Subscriber
from services.scheduler.core.core import Core
from services.scheduler.core.events import DeadlineReached, Event, MessagesMissed, PeerKey, PeerLost, PeerUp, Received
from services.scheduler.core.integrity import check_integrity
from shared.link import MISSED_BEATS
from shared.messages.common import Heartbeat, HelloWanted, Message, Refused
from shared.messages.gateway import GatewayHello
from shared.messages.storage import StorageHello, Superseded
from shared.messages.worker import WorkerHello

if TYPE_CHECKING:
    from kvtide.simulation.world import World

HELLOS = frozenset((WorkerHello, StorageHello, GatewayHello))


@dataclass
class Record:
    """What the shell knows of a peer."""

    key: PeerKey
    hello: Message
    heard: float
    interval: float
    up: bool = True


class Shell(Pausable):
    """One scheduler process."""

    def __init__(self, world: "World") -> None:
        super().__init__(world)
        self.epoch = world.new_epoch()
        self.core = Core(world.plan.settings)
        self.subscriber = Subscriber(world) if world.plan.settings.events else None
        self._records: dict[str, Record] = {}
        self._armed = float("inf")
        self._heartbeat = Heartbeat(world.plan.beat_s, {})
        world.network.scheduler = self
        world.network.succeed("scheduler", self, self.take)
        self.later(world.plan.beat_s, self._beat)

    def kill(self) -> None:
        """What it has counted stays known."""
        if self.alive:
            self.world.seen.update(self.core.state.counters)
        super().kill()

    def take(self, peer: PeerKey, receiver_epoch: int, message: Any) -> None:
        """A message has arrived."""
        if type(message) in HELLOS:
            self._take_hello(peer, message)
            return
        record = self._records.get(peer.identity)
        if record is None or record.key != peer or receiver_epoch != self.epoch:
            self.world.seen["old_epoch_at_scheduler"] += 1
            if record is None or peer.epoch >= record.key.epoch:
                self._send(peer, HelloWanted())
            return
        record.heard = self.world.clock.now
        if not record.up:
            record.up = True
            self.world.seen["peer_heard_again"] += 1
            self._feed(PeerUp(peer, record.hello))
        if type(message) is Heartbeat:
            record.interval = message.interval_s
        else:
            self._feed(Received(peer, message))

    def missed(self, identity: str) -> None:
        """Messages to or from a process were lost."""
        record = self._records.get(identity)
        if record is not None and record.up:
            self.world.seen["loss_noticed"] += 1
            self._feed(MessagesMissed(record.key))

    def _take_hello(self, peer: PeerKey, hello: Message) -> None:
        known = self._records.get(peer.identity)
        if known is not None and known.key.epoch > peer.epoch:
            self._send(peer, Refused("a newer process has the identity", False))
            return
        self._records[peer.identity] = Record(peer, hello, self.world.clock.now, self.world.plan.beat_s)
        self._feed(PeerUp(peer, hello))

    def _beat(self) -> None:
        now = self.world.clock.now
        for record in list(self._records.values()):
            if record.up and now - record.heard > MISSED_BEATS * record.interval:
                record.up = False
                self._feed(PeerLost(record.key))
            self._send(record.key, self._heartbeat)
        self.later(self.world.plan.beat_s, self._beat)

    def _feed(self, event: Event) -> None:
        world = self.world
        world.events += 1
        if world.traced:
            world.note(f"--> {_describe(event)}")
        for command in self.core.handle(event, world.clock.now):
            if world.traced:
                world.note(f"      {command.peer.identity} <-- {command.message!r}")
            self._send(command.peer, command.message)
        check_integrity(self.core)
        for operation in self.core.state.operations.table.values():
            if operation.failed:
                world.seen["pages_in_doubt"] += 1
                break
        check_progress(world, self.core)
        if world.first.armed:
            world.first.strike_armed()
        if self.subscriber is not None:
            self.subscriber.take(self.core.events)
        if type(event) is Received and type(event.message) is Superseded and not self.core.superseded:
            world.fail("a scheduler goes on without its lease")
        if self.core.superseded:
            world.seen["superseded"] += 1
            self.kill()
        self._arm()

    def _send(self, peer: PeerKey, message: Message) -> None:
        self.world.network.to_peer(self.epoch, peer, message)

    def _arm(self) -> None:
        deadline = self.core.next_deadline()
        if deadline is None or deadline >= self._armed:
            return
        self._armed = deadline
        self.later(max(0.0, deadline - self.world.clock.now), self._timer)

    def _timer(self) -> None:
        self._armed = float("inf")
        deadline = self.core.next_deadline()
        if deadline is not None and deadline <= self.world.clock.now:
            self._feed(DeadlineReached())
        else:
            self._arm()


def _describe(event: Event) -> str:
    match event:
        case Received(peer, message):
            return f"{peer.identity}@{peer.epoch}: {message!r}"
        case PeerUp(peer, _):
            return f"PeerUp {peer.identity}@{peer.epoch}"
        case PeerLost(peer):
            return f"PeerLost {peer.identity}@{peer.epoch}"
    return type(event).__name__
