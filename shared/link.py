"""A peer's link to its scheduler: hello, heartbeats, epochs. Workers, storages and gateways all use it."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

from shared.errors import ProtocolError
from shared.messages.common import Envelope, Heartbeat, HelloWanted, Message, Missed, Refused, Welcome
from shared.transport import Counters, Dealer, Decoder, Numbers, decode_envelope, encode

BUSY_INTERVAL_S = 1.0  # heartbeat while there is work: a dead peer is noticed within 3 s
IDLE_INTERVAL_S = 5.0  # heartbeat while there is none: keeps an idle stack below 2 % of a core
MISSED_BEATS = 3  # a peer is lost after this many announced intervals without a message
HELLO_RETRY_S = 0.5  # between two hellos while no scheduler answers
RECONNECT_S = 5.0  # unanswered for this long: the connection itself may be dead, or another's with our identity took it

log = logging.getLogger("kvtide.link")


class LinkOwner(Protocol):
    """What a service tells its link, and hears from it. All calls happen in the event loop."""

    def hello(self) -> Message:
        """The first message to a scheduler."""

    def stats(self) -> dict[str, float]:
        """Values for the heartbeat."""

    def busy(self) -> bool:
        """Is there work? It sets the heartbeat's interval."""

    def on_scheduler(self, epoch: int) -> None:
        """A scheduler has taken the hello; everything told by an earlier one is void."""

    def on_lost(self) -> None:
        """The scheduler is silent; it may come back with the same epoch or be replaced."""

    def on_message(self, message: Any) -> None:
        """A message of the current scheduler."""


def new_epoch() -> int:
    """An epoch for this process: ns since 1970, so that a successor's is larger."""
    return time.time_ns()


class SchedulerLink:
    """One DEALER to one scheduler."""

    def __init__(
        self,
        endpoint: str,
        identity: str,
        inbound: Any,
        owner: LinkOwner,
        clock: Callable[[], float] = time.monotonic,
        admits: Callable[[str, int], bool] = lambda identity, epoch: True,
        on_missed: Callable[[], None] = lambda: None,
    ) -> None:
        """admits(identity, epoch): may this scheduler process lead us now? It is asked again at each Welcome.

        on_missed(): messages of either side were lost. The scheduler asks again for what it waits for; whatever else
        this side has said or waits for may have to be said again.
        """
        self.epoch = new_epoch()
        self.scheduler_epoch = 0
        self.counters = Counters()
        self._endpoint = endpoint
        self._identity = identity
        self._dealer = Dealer(endpoint, identity)
        self._unanswered_s = clock()  # since when hellos have no answer
        self._decode = Decoder(inbound)
        self._owner = owner
        self._clock = clock
        self._admits = admits
        self._on_missed = on_missed
        self._numbers = Numbers()
        self._unknown = False  # the scheduler has asked who we are: what we said since it gave us up is lost
        self._refused = 0  # epoch of the scheduler that may not lead
        self._up = False
        self._heard_s = 0.0
        self._interval_s = IDLE_INTERVAL_S  # announced by the scheduler
        self._announced_s = IDLE_INTERVAL_S  # announced by us
        self._wake = asyncio.Event()

    @property
    def up(self) -> bool:
        """True while a scheduler has taken our hello and is heard."""
        return self._up

    async def run(self) -> None:
        """Serve until cancelled. Raises ProtocolError when the scheduler refuses us for good."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._beat(tasks))
        except* ProtocolError as group:
            raise group.exceptions[0] from None
        finally:
            self._dealer.close()

    def send(self, message: Message) -> bool:
        """Send to the current scheduler. False when it can't be reached: its own deadline will ask again."""
        sent = self._dealer.send(encode(self.epoch, self.scheduler_epoch, message, self._numbers.next()))
        if not sent:
            self.counters["unreachable"] += 1
        return sent

    def greet(self) -> None:
        """Say hello, to whichever scheduler is there."""
        self._numbers.sent = 0
        self._dealer.send(encode(self.epoch, 0, self._owner.hello()))

    def quicken(self) -> None:
        """Send a heartbeat now, with the busy interval announced, if the last one announced the idle one."""
        if self._announced_s == IDLE_INTERVAL_S:
            self._wake.set()

    async def _beat(self, tasks: asyncio.TaskGroup) -> None:
        receiver = tasks.create_task(self._receive())
        while True:
            if not self._up and self._clock() - self._unanswered_s > RECONNECT_S:
                receiver.cancel()
                await asyncio.wait([receiver])
                self._reconnect()
                receiver = tasks.create_task(self._receive())
            if self._up and self._clock() - self._heard_s > MISSED_BEATS * self._interval_s:
                self._up = False
                self._unanswered_s = self._clock()
                log.warning("scheduler_lost silent_s=%.1f", self._clock() - self._heard_s)
                self._owner.on_lost()
            if self._up:
                beat_s = BUSY_INTERVAL_S if self._owner.busy() else IDLE_INTERVAL_S
                self._announced_s = beat_s
                self.send(Heartbeat(beat_s, self._owner.stats()))
            else:
                beat_s = HELLO_RETRY_S
                self.greet()
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), beat_s)

    def _reconnect(self) -> None:
        log.warning("reconnecting unanswered_s=%.1f", self._clock() - self._unanswered_s)
        self.counters["reconnects"] += 1
        self._dealer.close()
        self._dealer = Dealer(self._endpoint, self._identity)
        self._unanswered_s = self._clock()

    async def _receive(self) -> None:
        while True:
            frames = await self._dealer.receive()
            try:
                if len(frames) != 2:
                    raise ProtocolError(f"a message has 2 frames, not {len(frames)}")
                envelope = decode_envelope(*frames)
                message = self._decode(frames[1])
            except ProtocolError as error:
                self.counters.malformed("scheduler", error)
                continue
            self._take(envelope, message)

    def _take(self, envelope: Envelope, message: Any) -> None:
        sender, receiver = envelope.sender_epoch, envelope.receiver_epoch
        if isinstance(message, HelloWanted):
            self._unknown = True
            self.greet()
            return
        if receiver != self.epoch or sender < self.scheduler_epoch:
            self.counters["old_epoch"] += 1
            return
        if isinstance(message, Refused):
            if not message.retry:
                raise ProtocolError(f"the scheduler refused this process: {message.reason}")
            log.warning("hello_refused reason=%s", message.reason)
            return
        if isinstance(message, Welcome):
            if not self._admits(message.identity, sender):
                self._refused, self._unanswered_s = sender, self._clock()
                return
            self._refused = 0
            self._heard_s = self._clock()
            self._numbers.received = envelope.number
            known, self._unknown = not self._unknown, False
            if sender != self.scheduler_epoch or not self._up:
                self.scheduler_epoch = sender
                self._up = True
                self._owner.on_scheduler(sender)
            elif not known:
                self._on_missed()
            return
        if sender == self._refused:
            return
        if sender != self.scheduler_epoch:
            self.counters["old_epoch"] += 1
            self.greet()
            return
        self._heard_s = self._clock()
        skipped = self._numbers.skipped(envelope.number)
        if skipped or isinstance(message, Missed):
            self._miss(skipped)
        if isinstance(message, Missed):
            return
        if isinstance(message, Heartbeat):
            # Heard again with the same epoch while not up: the scheduler may have given us up, and `_beat` greets it
            # anew. Not here: after a long stop there is a heartbeat in the queue for each second of it.
            self._interval_s = message.interval_s
            return
        self._owner.on_message(message)

    def _miss(self, skipped: bool) -> None:
        self.counters.missed("scheduler")
        if skipped and self._up:
            self.send(Missed())
        self._on_missed()
