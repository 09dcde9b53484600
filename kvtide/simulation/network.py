"""Messages between the scheduler and its peers: late, lost, doubled; in order on each link, as ZeroMQ keeps them."""

import random
from typing import TYPE_CHECKING

from kvtide.simulation.clock import Action
from kvtide.simulation.plan import Plan
from services.scheduler.core.events import PeerKey
from shared.messages.common import Message
from shared.messages.storage import PeerExited
from shared.messages.worker import RunStep

if TYPE_CHECKING:
    from kvtide.simulation.process import Process
    from kvtide.simulation.shell import Shell
    from kvtide.simulation.world import World


HELD_S = 0.1  # between two tries to bring a safe message over a cut link


class Network:
    """Knows who is there now: a message is delivered to the process that has the name when it arrives."""

    def __init__(self, world: "World", plan: Plan) -> None:
        self._world = world
        self._plan = plan
        self._rng = random.Random(f"network {plan.seed}")
        self._last: dict[tuple[str, bool], float] = {}  # arrival of a link's last message
        self.scheduler: Shell | None = None
        self.peers: dict[str, Process] = {}  # by identity
        self.cut: set[str] = set()  # identities that nothing reaches, and that reach nobody

    def to_scheduler(self, sender: PeerKey, receiver_epoch: int, message: Message) -> None:
        """A peer sends."""

        def arrive() -> None:
            shell = self.scheduler
            if shell is not None:
                shell.deliver(lambda: shell.take(sender, receiver_epoch, message))

        safe = sender.identity.startswith("gateway") or isinstance(message, PeerExited)
        self._send(sender.identity, True, arrive, safe=safe)

    def to_peer(self, sender_epoch: int, receiver: PeerKey, message: Message) -> None:
        """The scheduler sends. A step may not overtake the one before it, so none is lost where two are in flight."""
        safe = receiver.identity.startswith("gateway")
        ordered = isinstance(message, RunStep) and self._plan.max_steps > 1

        def arrive() -> None:
            process = self.peers.get(receiver.identity)
            if process is not None:
                process.deliver(lambda: process.take(sender_epoch, receiver.epoch, message))

        self._send(receiver.identity, False, arrive, safe=safe, lossless=ordered)

    def _deliver(self, identity: str, arrive: Action, safe: bool) -> None:
        if identity not in self.cut:
            arrive()
        elif safe:
            self._world.clock.after(HELD_S, lambda: self._deliver(identity, arrive, safe))

    def _send(self, identity: str, up: bool, arrive: Action, *, safe: bool, lossless: bool = False) -> None:
        """`safe`: nobody asks for the message again, so that only a process's end loses it. `lossless`: only a cut."""
        if identity in self.cut and not safe:
            return
        clock, rng, link = self._world.clock, self._rng, (identity, up)
        copies = 1
        if clock.now < self._plan.faults_end and not safe and not lossless:
            chance = rng.random()
            if chance < self._plan.lose:
                self._world.seen["message_lost"] += 1
                return
            if chance < self._plan.lose + self._plan.duplicate:
                self._world.seen["message_doubled"] += 1
                copies = 2
        for _ in range(copies):
            at = max(self._last.get(link, 0.0), clock.now + rng.uniform(0.1, 1.0) * self._plan.latency_s)
            self._last[link] = at
            clock.after(at - clock.now, lambda: self._deliver(identity, arrive, safe))
