"""A simulated peer process: it can be paused and killed, and speaks to the scheduler as `shared.link` does."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from kvtide.simulation.clock import Action
from services.scheduler.core.events import PeerKey
from shared.link import HELLO_RETRY_S, MISSED_BEATS
from shared.messages.common import Heartbeat, HelloWanted, Message, Refused, Welcome
from shared.messages.storage import Superseded

if TYPE_CHECKING:
    from kvtide.simulation.shell import Shell
    from kvtide.simulation.world import World


class Pausable:
    """Runs actions while it lives; a paused process runs them when it goes on."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.alive = True
        self.paused = False
        self._inbox: list[tuple[Action, tuple[Any, ...]]] = []

    def deliver(self, action: Action, *args: Any) -> None:
        """Run now, or when the process goes on."""
        if self.paused:
            self._inbox.append((action, args))
        elif self.alive:
            action(*args)

    def later(self, delay: float, action: Action, *args: Any) -> None:
        """Run after a while of virtual time."""
        self.world.clock.put(delay, self.deliver, (action, *args))

    def pause(self) -> None:
        """SIGSTOP."""
        self.paused = True

    def resume(self) -> None:
        """SIGCONT."""
        self.paused = False
        held, self._inbox = self._inbox, []
        for action, args in held:
            self.deliver(action, *args)

    def kill(self) -> None:
        """SIGKILL."""
        self.alive = self.paused = False
        self._inbox.clear()


class Process(Pausable, ABC):
    """A peer of the scheduler."""

    holds_lease = False  # is connected to all schedulers: follows one while it is heard, then tells it that it's over

    def __init__(self, world: "World", identity: str) -> None:
        super().__init__(world)
        self.key = PeerKey(identity, world.new_epoch())
        self.link: Shell | None = None  # the scheduler that it is connected to, if not the newest
        self.scheduler_epoch = 0
        self.up = False
        self._heard = 0.0
        self._interval = world.plan.beat_s
        self._heartbeat = Heartbeat(self._interval, {})
        world.network.peers[identity] = self
        world.network.succeed(identity, self, self.take)
        self.later(world.rng.uniform(0.0, 0.05), self._beat)

    @abstractmethod
    def hello(self) -> Message:
        """The first message to a scheduler."""

    @abstractmethod
    def on_scheduler(self) -> None:
        """A scheduler has taken the hello."""

    def on_lost(self) -> None:
        """The scheduler is silent."""

    @abstractmethod
    def on_message(self, message: Message) -> None:
        """A message of the current scheduler."""

    def send(self, message: Message) -> None:
        """Send to the current scheduler."""
        self.world.network.to_scheduler(self.key, self.scheduler_epoch, message, self.link)

    def take(self, sender: int, receiver: int, message: Any) -> None:
        """What `SchedulerLink` does with a message. (`isinstance` takes five times as long with a msgspec class.)"""
        kind = type(message)
        if kind is HelloWanted:
            self._greet()
            return
        if receiver != self.key.epoch or sender < self.scheduler_epoch:
            self.world.seen["old_epoch_at_peer"] += 1
            if receiver == self.key.epoch and self.holds_lease:
                old = next((shell for shell in self.world.old_shells if shell.epoch == sender), None)
                answer = Superseded(self.scheduler_epoch)
                self.world.network.to_scheduler(self.key, sender, answer, old)
            return
        if kind is Refused:
            self.world.fail(f"{self.key.identity} was refused: {message.reason}")
            return
        if self.link is not None and self.link.alive and sender > self.link.epoch:
            if self.holds_lease and kind is Welcome:
                self.world.seen["lease_refused"] += 1
            return  # its lease, or its connection, is another scheduler's
        if kind is Welcome:
            self._heard = self.world.clock.now
            if sender != self.scheduler_epoch or not self.up:
                self.scheduler_epoch = sender
                self.up = True
                self.on_scheduler()
            return
        if sender != self.scheduler_epoch:
            self._greet()
            return
        self._heard = self.world.clock.now
        if kind is Heartbeat:
            if not self.up:
                self._greet()
            return
        self.on_message(message)

    def _greet(self) -> None:
        self.world.network.to_scheduler(self.key, 0, self.hello(), self.link)

    def _beat(self) -> None:
        if self.up and self.world.clock.now - self._heard > MISSED_BEATS * self._interval:
            self.up = False
            self.world.seen["scheduler_lost"] += 1
            self.on_lost()
            if self.holds_lease and self.link is not None:
                old, self.link = self.link, None
                self.world.network.to_scheduler(self.key, old.epoch, Superseded(self.world.shell.epoch), old)
        if self.up:
            self.send(self._heartbeat)
            if self.holds_lease and self.link is not None and self.link.alive:
                self.world.network.to_scheduler(self.key, 0, self.hello())
        else:
            self._greet()
        self.later(self._interval if self.up else HELLO_RETRY_S, self._beat)
