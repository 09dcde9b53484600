"""A simulated storage service, or what it does for one scheduler identity: its segments and names. The L3 store is
shared by the identities, and survives the process."""

import random
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from kvtide.simulation.checks import check_host_use
from kvtide.simulation.content import PageContent, checksum
from kvtide.simulation.process import Process
from kvtide.simulation.segment import Name, Segment
from services.scheduler.core.events import PeerKey
from shared.messages.common import Cancel, Cancelled, Fence, Fenced, Message, OperationFailed
from shared.messages.storage import (
    Adopted,
    AdoptPages,
    ArchiveDone,
    ArchivePages,
    BackendInfo,
    CommitPages,
    Committed,
    FindPages,
    Found,
    Holder,
    Inventory,
    ListPages,
    OpenSegment,
    PagesDropped,
    PeerExited,
    PrefetchDone,
    PrefetchPages,
    PrefetchProgress,
    Released,
    ReleasePages,
    SegmentOpened,
    StorageHello,
)
from shared.op_log import OpLog, Seen
from shared.packed import pack, unpack_list
from shared.page_hash import split_digests

if TYPE_CHECKING:
    from kvtide.simulation.world import World

RANK = 0
BATCH = 2  # pages between two reports
WATCH_S = 1.0


class StoredPage(NamedTuple):
    """A page in L3."""

    parts: tuple[PageContent, ...]  # for each rank
    checksums: bytes


class Transfer:
    """A running operation that touches pages."""

    def __init__(self, op_id: int, epoch: int) -> None:
        self.op_id = op_id
        self.epoch = epoch
        self.stop = False
        self.ended = False
        self.named: list[int] = []


class SimStorage(Process):
    """One storage process."""

    holds_lease = True

    def __init__(self, world: "World", number: int) -> None:
        super().__init__(world, f"storage-{number}")
        self.number = number
        self.backend_id = world.plan.backends[number]
        self.store = world.l3[self.backend_id]
        self._rng = random.Random(f"storage {self.key.epoch} {world.plan.seed}")
        self.current: Segment | None = None
        self._log = OpLog()
        self._fenced = 0  # op_id of the last Fence: what is older is stale
        self._epoch = 0
        self._running: list[Transfer] = []
        self._openings: list[Transfer] = []  # they touch no page, and a Fence waits for them, too
        self._fences: list[tuple[int, int, list[Transfer]]] = []
        self._held: set[tuple[PeerKey, int]] = set()
        self._gone: set[tuple[PeerKey, int]] = set()  # who mapped a segment and doesn't any more
        self.dropped: list[bytes] = []  # pages that L3 lost and of which the scheduler hasn't heard
        self._told: set[tuple[PeerKey, int]] = set()
        self.hello()
        self.later(WATCH_S, self._watch)

    def hello(self) -> Message:
        """See StorageHello."""
        plan = self.world.plan
        kind = "none" if self.backend_id == "none" else "memory"
        held = self._scan()
        return StorageHello(
            self.key.identity,
            BackendInfo(self.backend_id, kind, False, True, 0),
            self.current.info if self.current else None,
            [Holder(key.identity, key.epoch, epoch) for key, epoch in sorted(held)],
            plan.segment_budget * plan.host_pages,
            plan.credits,
        )

    def on_scheduler(self) -> None:
        """Another scheduler's transfers are stopped."""
        if self.scheduler_epoch != self._epoch:
            self._epoch = self.scheduler_epoch
            self._log.clear()
            self._fenced = 0
            self._stop(lambda transfer: True)

    def on_message(self, message: Any) -> None:
        """Carry out a command once."""
        if isinstance(message, Cancel):
            self._cancel(message.target)
            return
        seen = self._log.begin(message.op_id)
        if seen is Seen.NEW and message.op_id < self._fenced:  # it was overtaken by a Fence
            self._answer(self._epoch, message.op_id, OperationFailed(message.op_id, RANK, "stale", -1, b""))
            return
        match seen:
            case Seen.NEW:
                self._carry_out(message)
            case Seen.DONE:
                answer = self._log.result(message.op_id)
                assert answer is not None
                self.send(answer)
            case Seen.STALE:
                self.send(OperationFailed(message.op_id, RANK, "stale", -1, b""))
            case Seen.RUNNING:
                pass

    def _cancel(self, target: int) -> None:
        """Every Cancel is answered: by its target's own answer, or by Cancelled when the target never came."""
        match self._log.begin(target):
            case Seen.NEW:
                self._answer(self._epoch, target, Cancelled(target, RANK, b""))
            case Seen.DONE:
                answer = self._log.result(target)
                assert answer is not None
                self.send(answer)
            case Seen.STALE:
                self.send(OperationFailed(target, RANK, "stale", -1, b""))
            case Seen.RUNNING:
                self._stop(lambda each: each.op_id == target and each.epoch == self._epoch)

    def _carry_out(self, message: Any) -> None:
        match message:
            case Fence():
                self._fenced = max(self._fenced, message.op_id)
                self._told.clear()  # what was told may have been lost
                waits = self._stop(lambda each: each.epoch != self._epoch or each.op_id < message.op_id)
                self._fences.append((message.op_id, self._epoch, [*waits, *self._openings]))
                self._open_fences()
            case OpenSegment():
                self._start_opening(message)
            case FindPages():
                self._after(message.op_id, self._pace(), lambda: self._find(message))
            case CommitPages() | ReleasePages() | PrefetchPages() | ArchivePages() | ListPages() | AdoptPages():
                if self.current is None or self.current.info.epoch != message.segment_epoch:
                    self._answer(self._epoch, message.op_id, self._failed(message.op_id, "segment"))
                elif isinstance(message, CommitPages):
                    self._answer(self._epoch, message.op_id, self._commit(self.current, message))
                elif isinstance(message, ReleasePages):
                    for page in unpack_list(message.pages):
                        self.current.names.pop(page, None)
                    self._answer(self._epoch, message.op_id, Released(message.op_id))
                elif isinstance(message, ListPages):
                    self._answer(self._epoch, message.op_id, self._list(self.current, message))
                elif isinstance(message, AdoptPages):
                    self._answer(self._epoch, message.op_id, self._adopt(self.current, message))
                elif isinstance(message, PrefetchPages):
                    self._prefetch(self.current, message)
                else:
                    self._archive(self.current, message)

    # --- names and segments -------------------------------------------------------------------------------------

    def _commit(self, segment: Segment, message: CommitPages) -> Message:
        pages = unpack_list(message.pages)
        if any(page in segment.names for page in pages):
            self.world.fail(f"commit {message.op_id} of pages that have names")
        for at, page in enumerate(pages):
            size = 4 * self.world.ranks
            name = Name(message.digests[32 * at : 32 * at + 32], message.checksums[size * at : size * at + size])
            if name.checksums != checksum(segment.parts(page)) and page not in segment.spoilt:
                self.world.fail(f"commit {message.op_id}: host page {page} was changed after its write was acked")
            if page not in segment.spoilt:
                self.world.first.pages.setdefault(name.digest, segment.parts(page))
            segment.names[page] = name
        return Committed(message.op_id)

    def _list(self, segment: Segment, message: ListPages) -> Message:
        part = range(message.first_page, message.first_page + message.count)
        pages = [page for page in part if page in segment.names]
        self.world.seen["inventory_pages"] += len(pages)
        return Inventory(message.op_id, pack(pages), b"".join(segment.names[page].digest for page in pages))

    def _adopt(self, segment: Segment, message: AdoptPages) -> Message:
        digests = split_digests(message.digests)
        named = [
            at
            for at, page in enumerate(unpack_list(message.pages))
            if page in segment.names and segment.names[page].digest == digests[at]
        ]
        if len(named) < len(digests):
            self.world.fail(f"adoption {message.op_id} of pages that have no or another name")
        for at, page in enumerate(unpack_list(message.pages)):
            if self.world.first.pages.get(digests[at]) != segment.parts(page) and page not in segment.spoilt:
                self.world.fail(f"adoption {message.op_id} of host page {page}, which holds something else")
        return Adopted(message.op_id, pack(named))

    def _start_opening(self, message: OpenSegment) -> None:
        opening = Transfer(message.op_id, self._epoch)
        self._openings.append(opening)
        self.later(self._pace(), lambda: self._end(opening, self._open(message)))

    def _open(self, message: OpenSegment) -> Message:
        plan, world = self.world.plan, self.world
        if self.current is not None and not message.fresh:
            return SegmentOpened(message.op_id, self.current.info)
        mapped = sum(
            1 for (storage, _), each in world.segments.items() if storage == self.key.identity and each.holders
        )
        if mapped >= plan.segment_budget or self.key.identity in world.refusing:
            world.seen["segment_refused"] += 1
            return self._failed(message.op_id, "full")
        if any(not transfer.ended for transfer in self._running):
            return self._failed(message.op_id, "full")
        lease = (plan.first_page, plan.host_pages - plan.first_page)
        segment = Segment(self.key.identity, world.new_epoch(), plan.host_pages, lease, message.geometry, world.model)
        world.segments[self.key.identity, segment.info.epoch] = self.current = segment
        return SegmentOpened(message.op_id, segment.info)

    def _scan(self) -> set[tuple[PeerKey, int]]:
        """Who maps which segment. Processes that don't any more are told to the scheduler at the next watch."""
        mine = [(epoch, each) for (storage, epoch), each in self.world.segments.items() if storage == self.key.identity]
        held = {(key, epoch) for epoch, segment in mine for key in segment.holders}
        self._gone |= {(key, epoch) for epoch, segment in mine for key in segment.exited} | self._held - held
        self._held = held
        return held

    def _watch(self) -> None:
        self._scan()
        if self.up:
            for key, epoch in sorted(self._gone - self._told):
                self.send(PeerExited(key.identity, key.epoch, epoch))
            self._told = set(self._gone)
            if self.dropped:
                self.send(PagesDropped(b"".join(self.dropped)))
                self.dropped.clear()
        self.later(WATCH_S, self._watch)

    # --- L3 -----------------------------------------------------------------------------------------------------

    def _find(self, message: FindPages) -> Message:
        store, hits = self.store, 0
        for start in range(0, len(message.digests), 32):
            if message.digests[start : start + 32] not in store:
                break
            hits += 1
        return Found(message.op_id, hits)

    def _prefetch(self, segment: Segment, message: PrefetchPages) -> None:
        pages = unpack_list(message.pages)
        began = self.world.clock.now
        transfer = self._transfer(message.op_id)
        corrupt = 0
        if any(page in segment.names for page in pages):
            self.world.fail(f"prefetch {message.op_id} into pages that have names")

        def batch(first: int) -> None:
            nonlocal corrupt
            if transfer.stop or first >= len(pages):
                done = PrefetchDone(message.op_id, pack(transfer.named), corrupt, self.world.clock.now - began)
                self._end(transfer, Cancelled(message.op_id, RANK, pack(transfer.named)) if transfer.stop else done)
                return
            if self.world.failing_l3:  # what it has told stays named
                done = PrefetchDone(message.op_id, pack(transfer.named), corrupt, self.world.clock.now - began)
                self._end(transfer, done if transfer.named else self._failed(message.op_id, "error"))
                return
            check_host_use(self.world, segment, pages[first : first + BATCH])
            for at in range(first, min(first + BATCH, len(pages))):
                digest = message.digests[32 * at : 32 * at + 32]
                stored = self.store.get(digest)
                if stored is not None and checksum(stored.parts) != stored.checksums:
                    corrupt += 1
                    self.world.first.drop_from_l3(self.backend_id, [digest])
                    self.world.seen["l3_corrupt_read"] += 1
                    stored = None
                if stored is not None:
                    for rank, part in enumerate(stored.parts):
                        segment.content[rank][pages[at]] = part
                    segment.names[pages[at]] = Name(digest, stored.checksums)
                    transfer.named.append(at)
            self._tell(transfer, PrefetchProgress(message.op_id, pack(transfer.named)))
            self.later(self._pace(), lambda: batch(first + BATCH))

        self.later(self._pace(), lambda: batch(0))

    def _archive(self, segment: Segment, message: ArchivePages) -> None:
        pages = unpack_list(message.pages)
        transfer = self._transfer(message.op_id)
        stored: list[int] = []

        def batch(first: int) -> None:
            if transfer.stop or first >= len(pages):
                there = [at for at in stored if message.digests[32 * at : 32 * at + 32] in self.store]
                done = ArchiveDone(message.op_id, pack(there), 0.0)
                self._end(transfer, Cancelled(message.op_id, RANK, b"") if transfer.stop else done)
                return
            check_host_use(self.world, segment, pages[first : first + BATCH])
            for at in range(first, min(first + BATCH, len(pages))):
                digest = message.digests[32 * at : 32 * at + 32]
                name = segment.names.get(pages[at])
                if name is None or name.digest != digest:
                    self.world.fail(f"archive {message.op_id} of host page {pages[at]}, which has another name")
                elif not self.world.failing_l3:
                    self.store.setdefault(digest, StoredPage(segment.parts(pages[at]), name.checksums))
                    stored.append(at)
            excess = len(self.store) - self.world.plan.l3_pages
            if excess > 0:
                self.world.seen["l3_quota_dropped"] += excess
                self.world.first.drop_from_l3(self.backend_id, list(islice(self.store, excess)))
            self.later(self._pace(), lambda: batch(first + BATCH))

        self.later(self._pace(), lambda: batch(0))

    def _pace(self) -> float:
        slow = self.world.slow_l3_s if self.world.slow_l3_s and self._rng.random() < 0.7 else 0.0
        return self._rng.uniform(0.0, self.world.plan.l3_s) + slow

    # --- operations ---------------------------------------------------------------------------------------------

    def _transfer(self, op_id: int) -> Transfer:
        transfer = Transfer(op_id, self._epoch)
        self._running.append(transfer)
        return transfer

    def _end(self, transfer: Transfer, answer: Message) -> None:
        transfer.ended = True
        (self._openings if transfer in self._openings else self._running).remove(transfer)
        self._answer(transfer.epoch, transfer.op_id, answer)
        self._open_fences()

    def _tell(self, transfer: Transfer, message: Message) -> None:
        if transfer.epoch == self._epoch:
            self.send(message)

    def _stop(self, which: Callable[[Transfer], bool]) -> list[Transfer]:
        stopped = [transfer for transfer in self._running if which(transfer)]
        for transfer in stopped:
            transfer.stop = True
        return stopped

    def _open_fences(self) -> None:
        for fence in list(self._fences):
            op_id, epoch, waits = fence
            if all(transfer.ended for transfer in waits):
                self._fences.remove(fence)
                self._answer(epoch, op_id, Fenced(op_id, RANK))

    def _after(self, op_id: int, delay: float, work: Callable[[], Message]) -> None:
        epoch = self._epoch
        self.later(delay, lambda: self._answer(epoch, op_id, work()))

    def _answer(self, epoch: int, op_id: int, answer: Message) -> None:
        if epoch == self._epoch:
            self._log.finish(op_id, answer)
            self.send(answer)

    def _failed(self, op_id: int, reason: str) -> Message:
        return OperationFailed(op_id, RANK, reason, -1, b"")
