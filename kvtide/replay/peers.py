"""Peers that do at once, or after a time that a cost model gives, what the core tells them. They hold no bytes."""

import heapq
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

from kvtide.replay.costs import Costs
from services.scheduler.core.core import Core
from services.scheduler.core.events import DeadlineReached, Event, PeerKey, PeerUp, Received
from services.scheduler.core.settings import CoreSettings
from shared.errors import IntegrityError
from shared.geometry import PageGeometry, Part
from shared.messages import common, gateway, storage, worker
from shared.packed import pack
from shared.page_hash import split_digests

WORKER, STORAGE, GATEWAY = (PeerKey(name, 1) for name in ("worker", "storage", "gateway"))
SEGMENT_EPOCH = 1
MODEL = bytes(32)
CREDITS = 1024  # operations in flight at one peer: what a real worker grants
MAX_CONTEXT = 2**30  # tokens: the pools are the only bound

# A page's id of 64 bits is sent as two tokens; a last token that fills no page makes all of them whole prefix pages.
PAGE_TOKENS = 2
GEOMETRY = PageGeometry(PAGE_TOKENS, 1, (Part("k", 1, 1, "uint8"),))


class Tiers(NamedTuple):
    """Pages of each tier; 0 = no such tier."""

    device: int
    host: int = 0
    storage: int = 0


class Stack:
    """The core and its peers on one clock."""

    def __init__(self, settings: CoreSettings, tiers: Tiers, costs: Costs, on_answer: Callable[[Any], None]) -> None:
        self.core = Core(settings)
        self.now = 0.0
        self.written_host_pages = self.written_storage_pages = 0
        self._tiers = tiers
        self._costs = costs
        self._on_answer = on_answer
        self._due: list[tuple[float, int, Event]] = []
        self._number = 0
        self._running: set[int] = set()  # op_ids: a command that is sent again isn't carried out again
        self._loads: dict[int, float] = {}  # op_id -> when it ends
        self._store: OrderedDict[bytes, None] = OrderedDict()  # L3 by digest, oldest use first
        self.feed(PeerUp(GATEWAY, gateway.GatewayHello("gateway")))
        # One page more than the tier has, for the token that fills none; and page 0.
        self.feed(PeerUp(WORKER, worker.WorkerHello(
            "worker", 0, GEOMETRY, MODEL, tiers.device + 2, settings.max_running, MAX_CONTEXT, 1, CREDITS, [],
        )))  # fmt: skip
        if tiers.host:
            backend = storage.BackendInfo("l3", "memory" if tiers.storage else "none", False, True, 0)
            self.feed(PeerUp(STORAGE, storage.StorageHello("storage", backend, None, [], 0, CREDITS)))
        self.run()
        if tiers.host and not any(pool.usable for pool in self.core.host.pools.values()):
            raise IntegrityError("the replay's host pool was not taken by the core")

    def feed(self, event: Event) -> None:
        """Give the core an event now and its commands to the peers."""
        for peer, message in self.core.handle(event, self.now):
            if peer == GATEWAY:
                self._on_answer(message)
            else:
                self._obey(peer, message)

    def run(self) -> None:
        """Let everything happen that is under way."""
        while self.run_next():
            pass

    def run_next(self, until: float = float("inf")) -> bool:
        """Let the next thing happen, if one is due by `until`, seconds. Deadlines count while work is under way."""
        if not self._due or self._due[0][0] > until:
            return False
        at = self._due[0][0]
        deadline = self.core.next_deadline()
        if deadline is not None and self.now < deadline < at:
            self.now = deadline
            self.feed(DeadlineReached())
            return True
        _, _, event = heapq.heappop(self._due)
        self.now = max(self.now, at)
        if isinstance(event, Received):
            self._running.discard(getattr(event.message, "op_id", 0))
        self.feed(event)
        return True

    def _later(self, when: float, event: Event) -> None:
        self._number += 1
        heapq.heappush(self._due, (when, self._number, event))

    def _obey(self, peer: PeerKey, message: Any) -> None:
        match message:
            case common.Welcome() | common.HelloWanted():
                return
            case common.Cancel():  # what it names goes on and is answered by its own ack
                return
            case common.Refused():
                raise IntegrityError(f"the core refuses the replay's {peer.identity}: {message.reason}")
        if message.op_id in self._running:
            return
        self._running.add(message.op_id)
        when, answer = self._work(message) if peer == WORKER else self._store_work(message)
        self._later(when, Received(peer, answer))

    def _work(self, message: Any) -> tuple[float, common.Message]:
        op_id, now = message.op_id, self.now
        match message:
            case worker.RunStep():
                ends = max((self._loads.pop(load, now) for load in message.wait_for), default=now)
                pages = sum(map(_computed_pages, message.items))
                sampled = [worker.Sampled(item.row, 0, 0.0, b"", b"") for item in message.items if item.sampling]
                return self._costs.step(now, pages, ends), worker.StepDone(op_id, 0, sampled, 0.0)
            case worker.WritePages():
                pages = len(message.host_pages) // common.INT_BYTES
                self.written_host_pages += pages
                return self._costs.copy(now, pages, load=False), worker.WriteDone(op_id, 0, bytes(pages * 4), 0.0)
            case worker.LoadPages():
                end = self._costs.copy(now, len(message.host_pages) // common.INT_BYTES, load=True)
                self._loads[op_id] = end
                return end, worker.LoadDone(op_id, 0, 0.0)
            case worker.MapSegment():
                return now, worker.SegmentMapped(op_id, 0)
            case common.Fence():
                return now, common.Fenced(op_id, 0)
        raise IntegrityError(f"the replay's worker doesn't know {type(message).__name__}")

    def _store_work(self, message: Any) -> tuple[float, common.Message]:
        op_id, now = message.op_id, self.now
        match message:
            case storage.CommitPages():
                return now, storage.Committed(op_id)
            case storage.ReleasePages():
                return now, storage.Released(op_id)
            case storage.FindPages():
                return now, storage.Found(op_id, self._leading(split_digests(message.digests)))
            case storage.PrefetchPages():
                digests = split_digests(message.digests)
                named = [at for at, digest in enumerate(digests) if digest in self._store]
                for at in named:
                    self._store.move_to_end(digests[at])
                return self._costs.disk(now, len(named), read=True), storage.PrefetchDone(op_id, pack(named), 0, 0.0)
            case storage.ArchivePages():
                digests = split_digests(message.digests)
                end = self._costs.disk(now, self._archive(digests), read=False)
                return end, storage.ArchiveDone(op_id, pack(range(len(digests))), 0.0)
            case storage.OpenSegment():
                pages = self._tiers.host
                info = storage.SegmentInfo("storage", "", SEGMENT_EPOCH, pages + 1, 1, pages, GEOMETRY, MODEL)
                return now, storage.SegmentOpened(op_id, info)
            case common.Fence():
                return now, common.Fenced(op_id, 0)
        raise IntegrityError(f"the replay's storage doesn't know {type(message).__name__}")

    def _leading(self, digests: list[bytes]) -> int:
        return next((at for at, digest in enumerate(digests) if digest not in self._store), len(digests))

    def _archive(self, digests: list[bytes]) -> int:
        """Store what is new, the longest unused going for it; returns the number of pages written."""
        new = 0
        for digest in digests:
            new += digest not in self._store
            self._store[digest] = None
            self._store.move_to_end(digest)
        while len(self._store) > self._tiers.storage:
            self._store.popitem(last=False)
        self.written_storage_pages += new
        return new


def _computed_pages(item: worker.StepItem) -> int:
    """Pages that a step completes for one request; the token that fills none costs nothing."""
    end = item.start + len(item.tokens) // common.INT_BYTES
    return end // PAGE_TOKENS - item.start // PAGE_TOKENS
