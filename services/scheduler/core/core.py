"""The front of the core: events in, commands out (docs/architecture.md).

handle(event, now) -> commands      next_deadline() -> when to call with DeadlineReached
"""

from typing import Any

from services.scheduler.core.admin import Admin
from services.scheduler.core.admission import Admission
from services.scheduler.core.backup import Backup
from services.scheduler.core.device_memory import DeviceMemory
from services.scheduler.core.events import (
    CacheEvent,
    DeadlineReached,
    Event,
    MessagesMissed,
    PeerKey,
    PeerLost,
    PeerUp,
    Received,
    Send,
)
from services.scheduler.core.ghosts import Fate
from services.scheduler.core.host_memory import HostMemory
from services.scheduler.core.load_back import LoadBack, first_bad
from services.scheduler.core.operations import Archive, Control, Find, Load, Operation, Prefetch, Release, Step, Write
from services.scheduler.core.pages import HostPool, PagePool
from services.scheduler.core.peers import Peers
from services.scheduler.core.prefetch import Prefetcher
from services.scheduler.core.request import RequestKey, RequestState
from services.scheduler.core.requests import Requests
from services.scheduler.core.settings import CoreSettings
from services.scheduler.core.state import State
from services.scheduler.core.steps import Steps
from services.scheduler.core.why import Why
from shared.messages import common, gateway, storage, worker
from shared.page_hash import split_digests


class Core:
    """One scheduler's mind. Feed it events in order; it never blocks and never fails on a peer's message."""

    def __init__(self, settings: CoreSettings) -> None:
        self.state = State(settings)
        self.host = HostMemory(self.state)
        self.backup = Backup(self.state, self.host)
        self.load_back = LoadBack(self.state, self.host)
        self.device = DeviceMemory(self.state, self.host, self.backup)
        self.prefetcher = Prefetcher(self.state, self.host)
        self.requests = Requests(self.state, self.device, self.prefetcher)
        self.steps = Steps(self.state, self.requests, self.device)
        self.why = Why(self.state, self.host)
        self.admin = Admin(self.state, self.host)
        managers = (self.requests, self.device, self.prefetcher, self.load_back, self.backup, self.why, self.admin.pins)
        self.admission = Admission(self.state, *managers)
        self.peers = Peers(self.state, self)
        self.gateways: set[PeerKey] = set()
        self.superseded = False  # another scheduler has our lease: nothing is sent any more, the process must exit

    def handle(self, event: Event, now: float) -> list[Send]:
        """Take one event; returns the commands that it causes, in order."""
        self.state.now = self.state.operations.now = self.state.ghosts.now = now
        if self.state.published is not None:
            self.state.published.list.clear()
        if self.superseded:
            return []
        match event:
            case Received(peer, message):
                self._received(peer, message)
            case PeerUp(peer, hello):
                self._peer_up(peer, hello)
            case PeerLost(peer):
                self._peer_lost(peer)
            case MessagesMissed(peer):
                self.state.operations.hurry(peer)
            case DeadlineReached():
                self.state.operations.expire()
                self.requests.expire()
                self.peers.expire()
                self.admin.pins.expire()
        if not self.superseded:
            self._go_on()
        commands = self.state.outbox.copy()
        self.state.outbox.clear()
        return commands

    @property
    def events(self) -> list[CacheEvent]:
        """The KV events of the last `handle`, in order; none unless the settings ask for them."""
        return self.state.published.list if self.state.published is not None else []

    def next_deadline(self) -> float | None:
        """When `handle(DeadlineReached(), ...)` is due; None = never."""
        first = min(self.state.operations.next_deadline(), self.requests.next_deadline())
        earliest = min(first, self.peers.next_deadline(), self.admin.pins.next_deadline())
        return None if self.superseded or earliest == float("inf") else earliest

    def _go_on(self) -> None:
        """Do what the event has made possible."""
        self._deal_with_failures()
        while self.state.space_freed:
            self.state.space_freed = False
            self.prefetcher.retry()
            self.backup.retry()
            self._deal_with_failures()
        self.admission.plan()
        self.admin.go_on()
        self.host.flush()

    # --- peers --------------------------------------------------------------------------------------------------

    def _peer_up(self, peer: PeerKey, hello: Any) -> None:
        match hello:
            case worker.WorkerHello():
                self.peers.worker_up(peer, hello)
            case storage.StorageHello():
                self.peers.storage_up(peer, hello)
            case gateway.GatewayHello():
                for old in [known for known in self.gateways if known.identity == peer.identity and known != peer]:
                    self._peer_lost(old)
                self.gateways.add(peer)
                self.state.send(peer, common.Welcome(self.state.settings.identity))

    def _peer_lost(self, peer: PeerKey) -> None:
        if peer in self.gateways:
            self.gateways.discard(peer)
            self.requests.reject_all(peer)
            return
        self.state.counters["peers_lost"] += 1
        self.state.operations.lost(peer)
        self.peers.lost(peer)
        for operation in sorted(self.state.operations.of_peer(peer), key=lambda op: -op.op_id):
            if isinstance(operation, Find) and len(operation.waiting) > 1:  # the others may have what is looked for
                self.state.operations.answered(operation.op_id, peer)
            else:
                self.state.operations.fail(operation)

    def group_ready(self, hellos: list[worker.WorkerHello]) -> None:
        """All ranks are there and have fenced: a new group gets a new device pool."""
        if self.state.device.dead:
            self.state.device = PagePool(1, min(hello.device_pages for hello in hellos) - 1)
            if self.state.reuse is not None:
                self.state.reuse.resize_device(self.state.device.total)
            self.requests.rows = list(range(min(hello.max_requests for hello in hellos), 0, -1))
        self.requests.max_context = min(hello.max_context for hello in hellos)
        self.admission.max_steps = min(hello.max_steps for hello in hellos)
        self.admin.pins.page_bytes = sum(hello.geometry.page_bytes for hello in hellos)
        self.requests.take_early()

    def group_withdrawn(self) -> None:
        """A rank is missing: pools are used again when the group has mapped them."""
        for pool in self.host.pools.values():
            pool.usable = False

    def worker_replaced(self, old: PeerKey) -> None:
        """The device pool is gone: every value with it. Host pages named to the old process stay in doubt."""
        self.state.operations.lost(old)
        for operation in sorted(self.state.operations.of_peer(old), key=lambda op: -op.op_id):
            self.state.operations.fail(operation)
        self._deal_with_failures()
        for request in sorted([*self.requests.running, *self.requests.draining], key=lambda request: request.number):
            if request.lock is not None:
                self.state.tree.unlock(request.lock)
            self.requests.abandon(request)
        self.state.device.dead = True
        for operation in list(self.state.operations.table.values()):
            self._forget_device(operation, old)
        with self.state.ghosts.because(Fate("lost", "gpu_worker")):
            self._drop_device_values()

    def _forget_device(self, operation: Operation, old: PeerKey) -> None:
        """Locks protect device pages, and those are gone; a step or control of the old process is over."""
        if isinstance(operation, (Prefetch, Find)):
            self.state.operations.fail(operation)
            self._deal_with_failures()
        if isinstance(operation, Step):
            self.steps.forget(operation)
        if isinstance(operation, (Write, Load)) and operation.lock is not None and not operation.failed:
            self.state.operations.fail(operation)
            self._deal_with_failures()
        lock, operation.lock = operation.lock, None
        if lock is not None:
            self.state.unlock(lock)
        if isinstance(operation, (Step, Control)) and old in operation.waiting:
            self.state.operations.answered(operation.op_id, old)

    def _drop_device_values(self) -> None:
        tree = self.state.tree
        for request in self.requests.all.values():
            self.prefetcher.unreserve(request)
        for node in list(tree.nodes()):
            if node.value is not None:
                tree.drop_value(node)
        for node in list(tree.nodes()):
            if not node.is_root and not node.detached and node.host is None:
                self.host.release(tree.detach(node).host)

    def storage_replaced(self, old: PeerKey) -> None:
        """The pool is gone, and what the old process did to it doesn't matter any more."""
        self.storage_lost(old)
        self.host.lose(old)
        for operation in self.state.operations.of_peer(old):
            self.state.operations.fail(operation)
        self._deal_with_failures()
        for operation in self.state.operations.gone(old):
            self._settle(operation)

    def storage_lost(self, key: PeerKey) -> None:
        """No command goes to the storage until it has fenced; who waits for pages of it looks elsewhere."""
        pool = self.host.pools.get(key)
        if pool is not None:
            pool.usable = False
            self.state.space_freed = True

    def pool_ready(
        self, key: PeerKey, hello: storage.StorageHello, segment: storage.SegmentInfo, named: list[tuple[int, bytes]]
    ) -> None:
        """The pool may be used; a new one's `named` pages have a digest already."""
        pool = self.host.pools.get(key)
        if pool is not None and pool.segment_epoch != segment.epoch:
            self.host.lose(key)
            pool = None
        if pool is None:
            pool = HostPool(
                segment.storage_id, segment.epoch, segment.first_page, segment.page_count, self.state.host_order
            )
            pool.since = self.state.now
            pool.backend = hello.backend if hello.backend.kind != "none" else None
            self.state.add_host_pool(pool)
            self.host.pools[key] = pool
            self.host.orphan(pool, named)
        pool.usable = True
        self.state.space_freed = True

    def fenced(self, peer: PeerKey, op_id: int) -> None:
        """Operations before the fence have settled."""
        for operation in self.state.operations.of_peer(peer):
            if operation.op_id < op_id:
                self.state.operations.fail(operation)
        self._deal_with_failures()
        for operation in self.state.operations.gone(peer, below=op_id):
            self._settle(operation)

    # --- messages -----------------------------------------------------------------------------------------------

    def _received(self, peer: PeerKey, message: Any) -> None:
        operation = self.state.operations.table.get(getattr(message, "op_id", 0))
        match message:
            case _ if operation is not None and peer in operation.waiting:
                self._answered(operation, peer, message)
            case gateway.Submit():
                self.requests.submit(peer, message)
            case gateway.Abort(request_id):
                self.requests.abort(RequestKey(peer, request_id))
            case gateway.Administer():
                self.admin.carry_out(peer, message)
            case storage.Superseded():
                self._supersede()
            case storage.PagesDropped(digests):
                self.host.archiver.dropped(split_digests(digests))
            case storage.PeerExited(identity, epoch, segment_epoch, session):
                exited = PeerKey(identity, epoch)
                if not self.peers.has_joined_since(exited, segment_epoch, session):
                    self._unmapped(exited, segment_epoch)
            case _ if type(message) is not storage.PrefetchProgress:
                self.state.counters["late_answers"] += 1

    def _answered(self, operation: Operation, peer: PeerKey, message: Any) -> None:
        if type(message) is storage.PrefetchProgress:
            if isinstance(operation, Prefetch):
                self.prefetcher.progressed(operation, message.named)
            return
        self._note(operation, peer, message)
        self.state.operations.answered(operation.op_id, peer)
        if not operation.waiting:
            self._ended(operation, message)

    def _supersede(self) -> None:
        for gateway_key in sorted(self.gateways):
            self.requests.reject_all(gateway_key)
        self.state.outbox[:] = [send for send in self.state.outbox if send.peer in self.gateways]
        self.superseded = True  # what a worker or storage must do, the other scheduler says

    def _unmapped(self, peer: PeerKey, segment_epoch: int) -> None:
        """The process maps the segment no more (it has ended, or was told to drop it): it touches none of its pages."""
        self.state.counters["peers_exited"] += 1
        for operation in self.state.operations.of_peer(peer):
            if operation.pool is not None and operation.pool.segment_epoch == segment_epoch:
                self.state.operations.fail(operation)
        self._deal_with_failures()
        for operation in self.state.operations.gone(peer, segment_epoch=segment_epoch):
            self._settle(operation)
        self.peers.unmapped(peer, segment_epoch)

    def _note(self, operation: Operation, peer: PeerKey, message: Any) -> None:
        """Keep one rank's part of an answer."""
        given_up = type(message) in (common.OperationFailed, common.Cancelled)
        if isinstance(operation, Step):
            if type(message) is worker.StepDone and message.rank == 0:
                operation.results = message.sampled
            elif type(message) is worker.StepFailed:
                operation.error = message.reason
                if message.reason == "order":  # the step before it was lost, or is late
                    self.admission.in_order = False
                    self.state.operations.hurry(peer)
            elif given_up:
                operation.error = "error"
        elif isinstance(operation, Write) and type(message) is worker.WriteDone:
            operation.checksums[message.rank] = message.checksums
        elif isinstance(operation, Find) and type(message) is storage.Found:
            operation.hits[peer] = message.hits
        elif isinstance(operation, (Write, Load)) and given_up:
            if isinstance(operation, Load) and type(message) is common.OperationFailed:
                if message.reason in ("checksum", "name"):
                    bad = first_bad(message.positions, len(operation.host_pages))
                    operation.bad_from = bad if operation.bad_from < 0 else min(bad, operation.bad_from)
                self.state.counters[f"load_failed_{message.reason}"] += 1
            self.state.operations.fail(operation)
            self._deal_with_failures()

    def _ended(self, operation: Operation, message: Any) -> None:
        """Every process has answered."""
        self.state.speeds.ended(operation, message)
        if operation.failed:
            self._settle(operation, message)
            return
        match operation:
            case Step() if operation.error:
                self.steps.failed(operation, operation.error)
                self.steps.settle(operation)
            case Step():
                self.steps.done(operation, operation.results)
                self.steps.settle(operation)
            case Write() if operation.committing and isinstance(message, storage.Committed):
                self.backup.committed(operation)
            case Write() if operation.committing:
                self.state.operations.fail(operation)
                self._deal_with_failures()
                self._settle(operation)
            case Write():
                self.backup.written(operation)
            case Load():
                self.load_back.loaded(operation)
            case Archive():
                self.state.counters["archive_ended_pages"] += len(operation.host_pages)
                self.host.archiver.ended(operation, getattr(message, "stored", b""))
            case Release():
                operation.failed = not isinstance(message, storage.Released)
                self.host.released(operation)
            case Find():
                self.prefetcher.found(operation)
            case Prefetch():
                self.prefetcher.fetched(operation, getattr(message, "named", b""), getattr(message, "corrupt", 0))
            case Control():
                operation.on_done(message)

    def _deal_with_failures(self) -> None:
        """Give up the purpose of operations that have just failed; what they hold stays theirs."""
        while self.state.failures:
            operation = self.state.failures.pop(0)
            match operation:
                case Step():
                    self.steps.in_doubt(operation)
                case Write():
                    self.backup.failed(operation)
                case Load():
                    self.load_back.failed(operation)
                    for request in sorted(operation.requests, key=lambda request: request.number):
                        request.load_failures += 1
                        if request.state in (RequestState.RUNNING, RequestState.DRAINING):
                            self.requests.stop(request, trusted=False)
                    operation.requests.clear()
                case Find() | Prefetch():
                    self.prefetcher.give_up(operation)
                case Control():
                    operation.on_done(common.OperationFailed(operation.op_id, 0, "lost", -1, b""))
            if operation.waiting and self.state.operations.withdraw(operation):
                self._settle(operation)

    def _settle(self, operation: Operation, message: Any = None) -> None:
        """Nobody touches the pages of a failed operation any more."""
        match operation:
            case Step():
                self.steps.settle(operation)
            case Write():
                self.backup.settle(operation)
            case Load():
                self.load_back.settle(operation)
            case Archive():
                self.host.archiver.ended(operation)
            case Release():
                operation.failed = not isinstance(message, storage.Released)
                self.host.released(operation)
            case Prefetch() if message is not None:
                self.prefetcher.fetched(operation, getattr(message, "named", b""))
            case Prefetch():
                self.prefetcher.settle(operation)
            case Control() if isinstance(message, common.Fenced):
                operation.on_done(message)
