"""The asyncio shell round the core: sockets, heartbeats, the clock. It decides nothing."""

import asyncio
import json
import logging
import math
import time
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import asdict

from services.scheduler.core.core import Core
from services.scheduler.core.events import (
    DeadlineReached,
    Event,
    MessagesMissed,
    PeerKey,
    PeerLost,
    PeerUp,
    Received,
    Send,
)
from services.scheduler.core.settings import CoreSettings
from services.scheduler.core.status import integrity, status
from services.scheduler.event_publisher import EventPublisher
from services.scheduler.investment import investment
from services.scheduler.recorder import Recorder
from shared import tracing
from shared.config import Config
from shared.errors import ProtocolError
from shared.link import BUSY_INTERVAL_S, IDLE_INTERVAL_S, MISSED_BEATS, new_epoch
from shared.messages import ToScheduler
from shared.messages.common import Envelope, Heartbeat, HelloWanted, Message, Missed, Refused
from shared.messages.gateway import (
    Finish,
    GatewayHello,
    RecordWanted,
    Reject,
    Status,
    StatusWanted,
    Submit,
    Usage,
    Why,
    WhyWanted,
)
from shared.messages.storage import StorageHello
from shared.messages.worker import WorkerHello
from shared.transport import Counters, Decoder, Numbers, Router, VersionError, decode_envelope, encode

FIRST_INTERVAL_S = 5.0  # what a peer may take until its first heartbeat
PAUSE_S = 1.0  # a beat that is later than this: the scheduler itself did not run
INTEGRITY_REST = 100  # check_integrity rests this many times what it took: 1 % of a core however often status is asked
FORGET_PEER_S = 600.0  # a lost peer's name is kept in the status this long

log = logging.getLogger("kvtide.scheduler")


@dataclass
class PeerRecord:
    """What the shell knows of a process."""

    key: PeerKey
    role: str
    hello: Message
    heard_s: float
    interval_s: float = FIRST_INTERVAL_S
    up: bool = True
    stats: dict[str, float] = field(default_factory=dict)
    numbers: Numbers = field(default_factory=Numbers)


class SchedulerService:
    """Feeds the core with events and sends its commands."""

    def __init__(self, config: Config, identity: str = "scheduler-0") -> None:
        self.epoch = new_epoch()
        self.counters = Counters()
        self._core = Core(core_settings(config)._replace(identity=identity))
        self._router = Router(config.scheduler_endpoint)
        self._publisher = (
            EventPublisher(config.events, config.cache.page_size, self.epoch) if config.events.endpoint else None
        )
        self._recorder = Recorder(config.cache.page_size)
        self._decode = Decoder(ToScheduler)
        self._peers: dict[str, PeerRecord] = {}  # by identity
        self._started_s = time.monotonic()
        self._traced: dict[tuple[PeerKey, str], float] = {}  # open requests that are traced: when they came
        self._timer: asyncio.TimerHandle | None = None
        self._wake = asyncio.Event()
        self._ended = asyncio.Event()  # another scheduler has taken over
        self._interval_s = IDLE_INTERVAL_S
        self._integrity = "ok"
        self._checked_s = -math.inf  # when `_integrity` was found
        self._rest_s = 0.0  # until it is looked for again

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set."""
        tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._beat())]
        if self._publisher is not None:
            tasks.append(asyncio.create_task(self._publisher.serve_replays()))
        stopping = asyncio.create_task(stop.wait())
        ending = asyncio.create_task(self._ended.wait())
        try:
            done, _ = await asyncio.wait([*tasks, stopping, ending], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            if self._timer is not None:
                self._timer.cancel()
            for task in [*tasks, stopping, ending]:
                task.cancel()
            await asyncio.gather(*tasks, stopping, ending, return_exceptions=True)
            self._router.close()
            if self._publisher is not None:
                self._publisher.close()

    # --- in -----------------------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        while True:
            identity, frames = await self._router.receive()
            try:
                if len(frames) != 2:
                    raise ProtocolError(f"a message has 2 frames, not {len(frames)}")
                envelope = decode_envelope(*frames)
                message = self._decode(frames[1])
            except ProtocolError as error:
                self.counters.malformed(identity, error)
                if isinstance(error, VersionError):
                    self._send(PeerKey(identity, 0), Refused(str(error), False))
                continue
            self._take(identity, envelope, message)

    def _take(self, identity: str, envelope: Envelope, message: Any) -> None:
        peer = PeerKey(identity, envelope.sender_epoch)
        if isinstance(message, WorkerHello | StorageHello | GatewayHello):
            self._greet(peer, message)
            return
        record = self._peers.get(peer.identity)
        if record is None or record.key != peer or envelope.receiver_epoch != self.epoch:
            self.counters["old_epoch"] += 1
            if record is None or peer.epoch >= record.key.epoch:
                self._send(peer, HelloWanted())
            return
        record.heard_s = time.monotonic()
        if not record.up:
            record.up = True
            log.info("peer_back peer=%s", peer.identity)
            self._feed(PeerUp(peer, record.hello))
        if record.numbers.skipped(envelope.number):
            self._miss(record)
        if isinstance(message, Missed):
            self._ask_again(record)
        elif isinstance(message, Heartbeat):
            record.interval_s, record.stats = message.interval_s, message.stats
        elif isinstance(message, StatusWanted):
            self._send(peer, Status(json.dumps(self.status()).encode()))
        elif isinstance(message, WhyWanted):
            found = self._core.why.of(message.request_ids)
            self._send(peer, Why(message.question, json.dumps(found).encode()))
        elif isinstance(message, RecordWanted):
            self._recorder.want(peer, message)
        else:
            self._recorder.submitted(peer, message)
            if isinstance(message, Submit) and tracing.context_of(message.request_id):
                self._traced[peer, message.request_id] = time.monotonic()
            self._feed(Received(peer, message))

    def _miss(self, record: PeerRecord) -> None:
        self.counters.missed(record.key.identity)
        self._send(record.key, Missed())
        self._ask_again(record)

    def _ask_again(self, record: PeerRecord) -> None:
        if record.role != "gateway":  # a gateway submits again what it waits for
            self._feed(MessagesMissed(record.key))

    def _greet(self, peer: PeerKey, hello: Any) -> None:
        if hello.identity != peer.identity:
            self._send(peer, Refused(f"identity {hello.identity!r} differs from the socket's {peer.identity!r}", False))
            return
        known = self._peers.get(peer.identity)
        # Once the newer process is lost, an older epoch is a clock that was set back.
        if known is not None and known.up and known.key.epoch > peer.epoch:
            self._send(peer, Refused(f"a newer process has the identity {peer.identity!r}", False))
            return
        role = type(hello).__name__.removesuffix("Hello").lower()
        self._peers[peer.identity] = PeerRecord(peer, role, hello, time.monotonic())
        log.info("peer_up peer=%s role=%s epoch=%d", peer.identity, role, peer.epoch)
        self._feed(PeerUp(peer, hello))

    # --- the core -----------------------------------------------------------------------------------------------

    def _feed(self, event: Event) -> None:
        for command in self._core.handle(event, time.monotonic()):
            self._deliver(command)
        if self._publisher is not None:
            self._publisher.publish(self._core.events, time.time())
        if self._core.superseded:
            log.error("superseded: another scheduler leads this stack's storages; this one ends")
            self._ended.set()
        self._arm()
        if self._busy() and self._interval_s == IDLE_INTERVAL_S:
            self._wake.set()

    def _deliver(self, command: Send) -> None:
        match command.message:
            case Refused(reason=reason):
                log.warning("peer_refused peer=%s reason=%s", command.peer.identity, reason)
            case Finish(request_id, reason, usage):
                log.info("request id=%s finish=%s %s", request_id, reason, _pairs(usage))
                self._trace(command.peer, request_id, reason, asdict(usage))
            case Reject(request_id, code, text):
                log.info("request id=%s rejected=%d reason=%r", request_id, code, text)
                self._trace(command.peer, request_id, f"rejected {code}", {})
        self._send(command.peer, command.message)
        for peer, record in self._recorder.ended(command.peer, command.message):
            self._send(peer, record)

    def _trace(self, gateway: PeerKey, request_id: str, end: str, usage: dict[str, Any]) -> None:
        started_s = self._traced.pop((gateway, request_id), None)
        if started_s is not None:
            seconds = time.monotonic() - started_s
            attributes = {f"kvtide.{name}": value for name, value in usage.items() if isinstance(value, int | float)}
            tracing.record("schedule", request_id, seconds, **{"kvtide.end": end}, **attributes)

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self._core.next_deadline()
        if deadline is not None:
            delay = max(0.0, deadline - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay, self._feed, DeadlineReached())

    def _busy(self) -> bool:
        return bool(self._core.requests.all or self._core.state.operations.table)

    # --- out ----------------------------------------------------------------------------------------------------

    def _send(self, peer: PeerKey, message: Message) -> None:
        record = self._peers.get(peer.identity)
        counted = record is not None and record.key == peer and not isinstance(message, HelloWanted | Refused)
        number = record.numbers.next() if record is not None and counted else 0
        if not self._router.send(peer.identity, encode(self.epoch, peer.epoch, message, number)):
            self.counters["unreachable"] += 1

    async def _beat(self) -> None:
        due_s = time.monotonic()
        while True:
            now = time.monotonic()
            if now - due_s > PAUSE_S:
                # This process was stopped, not its peers: what they have sent meanwhile is still to be read.
                log.warning("paused seconds=%.1f", now - due_s)
                for record in self._peers.values():
                    record.heard_s += now - due_s
            for record in list(self._peers.values()):
                silent_s = now - record.heard_s
                if record.up and silent_s > MISSED_BEATS * record.interval_s:
                    record.up = False
                    log.warning("peer_lost peer=%s silent_s=%.1f", record.key.identity, silent_s)
                    self._recorder.leave(record.key)
                    self._feed(PeerLost(record.key))
                elif not record.up and (silent_s > FORGET_PEER_S or record.role == "gateway"):
                    del self._peers[record.key.identity]
            self._interval_s = BUSY_INTERVAL_S if self._busy() else IDLE_INTERVAL_S
            for record in self._peers.values():
                self._send(record.key, Heartbeat(self._interval_s, {}))
            self._wake.clear()
            due = [r.heard_s + MISSED_BEATS * r.interval_s - now for r in self._peers.values() if r.up]
            wait_s = max(0.05, min([self._interval_s, *due]))
            due_s = now + wait_s
            try:
                await asyncio.wait_for(self._wake.wait(), wait_s)
            except TimeoutError:
                continue

    def status(self) -> dict[str, Any]:
        """The core's status, its integrity and how old that finding is, and the peers."""
        now = time.monotonic()
        if now - self._checked_s >= self._rest_s:
            self._integrity = integrity(self._core)
            self._checked_s = now
            self._rest_s = INTEGRITY_REST * (time.monotonic() - now)
        return status(self._core) | {
            "integrity": self._integrity,
            "investment": investment(self._core.state.counters, (record.stats for record in self._peers.values())),
            "integrity_age_s": round(now - self._checked_s, 1),
            "scheduler": {"epoch": self.epoch, "uptime_s": round(now - self._started_s, 1)}
            | {"denied": self._router.denied, **self.counters},
            "peers": [
                {
                    "identity": record.key.identity,
                    "role": record.role,
                    "epoch": record.key.epoch,
                    "up": record.up,
                    "silent_s": round(now - record.heard_s, 1),
                    "stats": record.stats,
                }
                for record in self._peers.values()
            ],
        }


def _pairs(usage: Usage) -> str:
    return " ".join(f"{name}={value:.6g}" for name, value in asdict(usage).items())


def core_settings(config: Config) -> CoreSettings:
    """The core's share of the configuration."""
    cache, scheduler = config.cache, config.scheduler
    return CoreSettings(
        page_size=cache.page_size,
        write_policy=cache.write_policy,
        eviction=cache.eviction,
        namespace_share=cache.namespace_share,
        pin_bytes=cache.pin_bytes,
        load_policy=cache.load_policy,
        load_back_threshold=cache.load_back_threshold,
        prefetch=cache.prefetch,
        prefetch_threshold=cache.prefetch_threshold,
        prefetch_policy=cache.prefetch_policy,
        host_tier=cache.host_bytes > 0,
        adoption=True,
        explain=cache.explain,
        max_running=scheduler.max_running,
        max_queued=scheduler.max_queued,
        token_budget=scheduler.token_budget,
        request_timeout_s=scheduler.request_timeout_s,
        events=bool(config.events.endpoint),
    )


async def serve(config: Config, identity: str, stop: asyncio.Event) -> None:
    """Run the scheduler service."""
    service = SchedulerService(config, identity)
    log.info("listening identity=%s endpoint=%s epoch=%d", identity, config.scheduler_endpoint, service.epoch)
    await service.run(stop)
