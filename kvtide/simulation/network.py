"""Messages between the scheduler and its peers: lost, doubled, late, kept for a process's successor (as ZeroMQ may do),
otherwise in order on each link."""

import random
from collections import deque
from typing import TYPE_CHECKING, Any

from kvtide.simulation.clock import Action
from kvtide.simulation.plan import Plan
from services.scheduler.core.events import PeerKey
from shared.messages.common import Heartbeat, Message
from shared.messages.storage import PagesDropped, PeerExited

if TYPE_CHECKING:
    from kvtide.simulation.process import Pausable, Process
    from kvtide.simulation.shell import Shell
    from kvtide.simulation.world import World


LATE_S = (0.01, 0.3, 5.0)  # how long a late message may take
MOST_KEPT = 16  # messages for one successor
NOTICED = 0.5  # of lost messages, so that deadlines have something to do, too
HELD_S = 0.1  # between two tries to bring a safe message over a cut link
NEVER_AGAIN = frozenset((PeerExited, PagesDropped))  # what a storage tells once


class Network:
    """Knows who is there now: a message is delivered to the process that has the name when it arrives."""

    def __init__(self, world: "World", plan: Plan) -> None:
        self._world = world
        self._plan = plan
        self._rng = random.Random(f"network {plan.seed}")
        self._notices = random.Random(f"notices {plan.seed}")
        self._faults_end = plan.faults_end
        self._lossy = plan.lose + plan.duplicate + plan.late > 0
        self._last: dict[tuple[str, bool], float] = {}  # arrival of a link's last message
        self.scheduler: Shell | None = None
        self._kept: dict[str, deque[tuple[Any, ...]]] = {}  # for processes that have ended
        self.peers: dict[str, Process] = {}  # by identity
        self.cut: set[str] = set()  # identities that nothing reaches, and that reach nobody

    def to_scheduler(self, sender: PeerKey, receiver_epoch: int, message: Message, link: "Shell | None" = None) -> None:
        """A peer sends, to `link` if that still runs, else to the newest scheduler."""
        safe = type(message) in NEVER_AGAIN or sender.identity.startswith("gateway")
        self._send(sender.identity, True, safe, message, self._to_scheduler, (sender, receiver_epoch, message, link))

    def _to_scheduler(self, sender: PeerKey, receiver_epoch: int, message: Message, link: "Shell | None") -> None:
        shell = link if link is not None and link.alive else self.scheduler
        if shell is not None:
            shell.deliver(shell.take, sender, receiver_epoch, message)
        else:
            self._keep("scheduler", sender, receiver_epoch, message)

    def to_peer(self, sender_epoch: int, receiver: PeerKey, message: Message) -> None:
        """The scheduler sends."""
        safe = receiver.identity.startswith("gateway")
        self._send(receiver.identity, False, safe, message, self._to_peer, (sender_epoch, receiver, message))

    def _to_peer(self, sender_epoch: int, receiver: PeerKey, message: Message) -> None:
        process = self.peers.get(receiver.identity)
        if process is not None and process.alive:
            process.deliver(process.take, sender_epoch, receiver.epoch, message)
        else:
            self._keep(receiver.identity, sender_epoch, receiver.epoch, message)

    def _keep(self, identity: str, *args: Any) -> None:
        if type(args[-1]) is not Heartbeat:
            self._kept.setdefault(identity, deque(maxlen=MOST_KEPT)).append(args)

    def succeed(self, identity: str, process: "Pausable", take: Action) -> None:
        """A process has a successor: now and then it gets what was sent to the one before."""
        kept = self._kept.pop(identity, ())
        if kept and self._rng.random() < 0.5:
            self._world.seen["message_kept"] += len(kept)
            delay = self._rng.choice([0.01, 0.2, 1.0]) * self._rng.random()
            for args in kept:
                self._world.clock.after(delay, process.deliver, take, *args)

    def _deliver(self, identity: str, safe: bool, arrive: Action, args: tuple[Any, ...]) -> None:
        if identity not in self.cut:
            arrive(*args)
        elif safe:
            self._world.clock.after(HELD_S, self._deliver, identity, safe, arrive, args)

    def _lost(self, identity: str) -> None:
        """The next heartbeat has a number that follows none: the scheduler hears of it. Or a deadline passes first."""
        if self._notices.random() < NOTICED:
            delay = self._notices.random() * self._plan.beat_s
            self._world.clock.after(self._plan.latency_s + delay, self._notice, identity)

    def _notice(self, identity: str) -> None:
        if self.scheduler is not None and identity not in self.cut:
            self.scheduler.deliver(self.scheduler.missed, identity)

    def _send(
        self, identity: str, up: bool, safe: bool, message: Message, arrive: Action, args: tuple[Any, ...]
    ) -> None:
        """`safe`: nobody asks for the message again, so that only a process's end loses it."""
        if identity in self.cut and not safe:
            return
        if type(message) is Heartbeat:  # it says nothing but that it comes
            self._deliver(identity, safe, arrive, args)
            return
        clock, rng = self._world.clock, self._rng
        copies = 1
        if self._lossy and not safe and clock.now < self._faults_end:
            chance = rng.random()
            if chance < self._plan.lose:
                self._world.seen["message_lost"] += 1
                self._lost(identity)
                return
            if chance < self._plan.lose + self._plan.duplicate:
                self._world.seen["message_doubled"] += 1
                copies = 2
            if rng.random() < self._plan.late:
                self._world.seen["message_late"] += 1
                delay = rng.choice(LATE_S) * rng.random()
                clock.put(self._plan.latency_s + delay, self._deliver, (identity, safe, arrive, args))
                copies -= 1
        for _ in range(copies):
            at = max(self._last.get((identity, up), 0.0), clock.now + (0.1 + 0.9 * rng.random()) * self._plan.latency_s)
            self._last[identity, up] = at
            clock.put(at - clock.now, self._deliver, (identity, safe, arrive, args))
