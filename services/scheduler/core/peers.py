"""Who is there, who must fence, and whose memory is gone (docs/architecture.md: Restarts)."""

from collections import deque

from services.scheduler.core.events import PeerKey
from services.scheduler.core.operations import Control
from services.scheduler.core.peer import Listener, StoragePeer, WorkerPeer
from services.scheduler.core.settings import INVENTORY_CHUNK
from services.scheduler.core.state import State
from shared.messages.common import Fence, HelloWanted, OperationFailed, Refused, Welcome
from shared.messages.storage import (
    Inventory,
    ListPages,
    OpenSegment,
    ReleasePages,
    SegmentInfo,
    SegmentOpened,
    StorageHello,
)
from shared.messages.worker import DropSegment, MapSegment, WorkerHello
from shared.packed import pack, unpack_list
from shared.page_hash import split_digests

FENCE_TIMEOUT_S = 20.0  # a copy of a whole pool takes less; a writer that is silent for longer is stopped or stuck
MAX_FORGOTTEN = 1024  # storages whose return is still noticed: a word each
SEGMENT_RETRY_S = 5.0  # until a refused OpenSegment is asked again


class Peers:
    """Workers and storages; the listener is told when a group or a pool comes or goes."""

    def __init__(self, state: State, listener: Listener) -> None:
        self._state = state
        self._listener = listener
        self.workers: dict[int, WorkerPeer] = {}  # by rank
        self.storages: dict[str, StoragePeer] = {}  # by identity
        self._forgotten: deque[PeerKey] = deque(maxlen=MAX_FORGOTTEN)  # storages
        self._fences: dict[PeerKey, Control] = {}  # on their way

    # --- arrivals -----------------------------------------------------------------------------------------------

    def worker_up(self, key: PeerKey, hello: WorkerHello) -> None:
        """A worker says hello: first of all it must fence."""
        refusal = self._worker_refusal(hello)
        if refusal is not None:
            self._state.send(key, Refused(refusal, False))
            return
        known = self.workers.get(hello.rank)
        if known is not None and known.key == key:
            known.up, known.fenced = True, False
            known.mapped = {epoch: session for epoch, session in known.mapped.items() if epoch in hello.mapped}
        else:
            if known is not None:
                known.up = False
                self._withdraw_group()
                self._listener.worker_replaced(known.key)
                for other in self.workers.values():  # what they do for the old group ends before a new one begins
                    if other.up and other is not known:
                        other.fenced = False
                        self._fence(other.key)
            self.workers[hello.rank] = WorkerPeer(key, hello)
        self._withdraw_group()
        self._state.send(key, Welcome(self._state.settings.identity))
        self._fence(key)

    def _worker_refusal(self, hello: WorkerHello) -> str | None:
        tp_size, page_size = self._state.settings.tp_size, self._state.settings.page_size
        if hello.geometry.tp_size != tp_size or not 0 <= hello.rank < tp_size:
            return f"rank {hello.rank} of {hello.geometry.tp_size} can't join a group of {tp_size}"
        if hello.geometry.page_size != page_size:
            return f"page_size {hello.geometry.page_size} is not the scheduler's {page_size}: use one configuration"
        for other in self.workers.values():
            if other.up and other.hello.rank != hello.rank and other.hello.model_fingerprint != hello.model_fingerprint:
                return "its model or weights differ from the other ranks': give all ranks the same model folder"
        return None

    def storage_up(self, key: PeerKey, hello: StorageHello) -> None:
        """A storage says hello: first of all it must fence."""
        known = self.storages.get(key.identity)
        holders = {(PeerKey(each.identity, each.epoch), each.segment_epoch) for each in hello.holders}
        if known is not None and known.key == key:
            self._listener.storage_lost(key)
            known.up, known.fenced, known.hello = True, False, hello
            known.holders |= holders  # a paused worker may have mapped one for an earlier scheduler
        else:
            if known is not None:
                known.up = False
                self._listener.storage_replaced(known.key)
            fenced = {worker.key for worker in self.workers.values() if worker.fenced}
            known = self.storages[key.identity] = StoragePeer(key, hello, holders=holders, fenced_holders=fenced)
            known.tainted = key in self._forgotten
            self._state.counters["forgotten_storage_back"] += known.tainted
            if known.writers and hello.segment is not None:  # they may yet fence
                known.retry_at = self._state.now + FENCE_TIMEOUT_S
        self._state.send(key, Welcome(self._state.settings.identity))
        self._fence(key)

    def _fence(self, key: PeerKey) -> None:
        """Send a Fence, or repeat the one that is on its way: a process may say hello many times."""
        known = self._fences.get(key)
        if known is not None and known.message is not None and not known.failed:
            self._state.send(key, known.message)
            return
        op_id = self._state.operations.new_id()
        operation = Control(on_done=lambda message: self._fenced(key, message, op_id))
        self._fences[key] = operation
        self._state.operations.hold(key, op_id)
        self._state.operations.start(operation, Fence(op_id), [key])

    def _fenced(self, key: PeerKey, message: object, op_id: int) -> None:
        fence = self._fences.get(key)
        if fence is None or fence.op_id != op_id:
            return  # a newer one is on its way
        del self._fences[key]
        if isinstance(message, OperationFailed):
            if self._is_up(key):
                self._fence(key)
            return
        self._listener.fenced(key, op_id)
        for worker in self.workers.values():
            if worker.key == key:
                worker.fenced = True
                self._state.operations.grant(key, worker.hello.credits)
        for storage in self.storages.values():
            storage.fenced_holders.add(key)
            if storage.key == key:
                storage.fenced = True
                self._state.operations.grant(key, storage.hello.credits)
        self.advance()

    def _is_up(self, key: PeerKey) -> bool:
        peers: list[WorkerPeer | StoragePeer] = [*self.workers.values(), *self.storages.values()]
        return any(peer.key == key and peer.up for peer in peers)

    # --- departures ---------------------------------------------------------------------------------------------

    def lost(self, key: PeerKey) -> None:
        """Heartbeats are missing; the process may still run, so nothing that it may touch is free."""
        for worker in self.workers.values():
            if worker.key == key:
                worker.up = worker.fenced = False
                self._withdraw_group()
        for storage in self.storages.values():
            if storage.key == key:
                storage.up = storage.fenced = False
                storage.lost_at = self._state.now
                self._listener.storage_lost(key)

    def has_joined_since(self, key: PeerKey, segment_epoch: int, session: int) -> bool:
        """Does the process use the segment in a later session than this one? Then it fenced in between."""
        mapped = (worker.mapped.get(segment_epoch, 0) for worker in self.workers.values() if worker.key == key)
        return any(number > session for number in mapped)

    def unmapped(self, key: PeerKey, segment_epoch: int) -> None:
        """A storage has seen that the process maps a segment no more."""
        for storage in self.storages.values():
            storage.holders.discard((key, segment_epoch))
        for worker in self.workers.values():
            if worker.key == key and segment_epoch in worker.mapped:  # it wasn't told to: its process has ended
                del worker.mapped[segment_epoch]
                worker.fenced = False
                self._withdraw_group()
                self._fence(key)
        self.advance()

    # --- towards a usable stack ---------------------------------------------------------------------------------

    def advance(self) -> None:
        """Do the next thing that the group or a storage is waiting for."""
        ranks = [self.workers.get(rank) for rank in range(self._state.settings.tp_size)]
        group = [worker for worker in ranks if worker is not None and worker.up and worker.fenced]
        if len(group) < self._state.settings.tp_size:
            return
        if not self._state.workers:
            self._state.workers = [worker.key for worker in group]
            self._listener.group_ready([worker.hello for worker in group])
        for storage in self.storages.values():
            if storage.up and storage.fenced:
                self._advance_storage(storage, group)

    def _advance_storage(self, storage: StoragePeer, group: list[WorkerPeer]) -> None:
        segment = storage.segment or self._choose_segment(storage, group)
        if segment is None:
            return
        storage.segment = segment
        self._drop_old(storage, group, segment.epoch)
        if not storage.released:
            if self._state.settings.adoption:
                self._list_next(storage, segment)
            else:
                self._release_all(storage, segment)
            return
        for worker in group:
            if segment.epoch not in worker.mapping | worker.mapped.keys():
                self._map(segment, worker)
        if all(segment.epoch in worker.mapped for worker in group):
            named, storage.named = storage.named, []
            self._listener.pool_ready(storage.key, storage.hello, segment, named)

    def _choose_segment(self, storage: StoragePeer, group: list[WorkerPeer]) -> SegmentInfo | None:
        """The one that the storage offers, once its writers have fenced; else ask for a new one."""
        offered = storage.hello.segment
        hello = group[0].hello
        ours = (hello.model_fingerprint, hello.geometry)
        if offered is not None and (storage.tainted or (offered.model_fingerprint, offered.geometry) != ours):
            offered = None
        if offered is not None and not storage.writers:
            return offered
        waits = self._state.now < storage.retry_at < float("inf")
        self._drop_old(storage, group, offered.epoch if offered is not None and waits else 0)
        if not waits and not storage.opening:
            self._open(storage, group[0].hello, fresh=storage.tainted or bool(storage.writers))
        return None

    def _open(self, storage: StoragePeer, hello: WorkerHello, *, fresh: bool) -> None:
        def opened(message: object) -> None:
            storage.opening = False
            if isinstance(message, SegmentOpened):
                storage.segment, storage.retry_at = message.segment, float("inf")
                storage.released = fresh  # if it was there already, its pages have an earlier scheduler's names
                self.advance()
            else:
                self._state.counters["segment_refused"] += 1
                storage.retry_at = self._state.now + SEGMENT_RETRY_S
                self._state.send(storage.key, HelloWanted())  # who holds the memory?

        storage.opening = True
        message = OpenSegment(self._state.operations.new_id(), hello.geometry, hello.model_fingerprint, fresh)
        self._state.operations.start(Control(on_done=opened), message, [storage.key])

    def _release_all(self, storage: StoragePeer, segment: SegmentInfo) -> None:
        def released(message: object) -> None:
            storage.opening = False
            storage.released = not isinstance(message, OperationFailed)
            if storage.released:
                self.advance()
            else:
                self._look_again(storage, message)

        if not storage.opening:
            storage.opening = True
            pages = range(segment.first_page, segment.first_page + segment.page_count)
            message = ReleasePages(self._state.operations.new_id(), segment.epoch, pack(pages))
            self._state.operations.start(Control(on_done=released), message, [storage.key])

    def _list_next(self, storage: StoragePeer, segment: SegmentInfo) -> None:
        """Ask which pages an earlier scheduler has left with a name, part by part (docs/architecture.md: Restarts)."""
        end = segment.first_page + segment.page_count
        first = max(storage.listed_to, segment.first_page)

        def listed(message: object) -> None:
            storage.opening = False
            if not isinstance(message, Inventory):
                self._look_again(storage, message)
                return
            digests = split_digests(message.digests)
            storage.named += zip(unpack_list(message.pages), digests, strict=True)
            storage.listed_to = min(first + INVENTORY_CHUNK, end)
            storage.released = storage.listed_to == end
            self.advance()

        if not storage.opening:
            storage.opening = True
            op_id = self._state.operations.new_id()
            message = ListPages(op_id, segment.epoch, first, min(INVENTORY_CHUNK, end - first))
            self._state.operations.start(Control(on_done=listed), message, [storage.key])

    def _look_again(self, storage: StoragePeer, message: object) -> None:
        """A command about the segment has failed. When it isn't there, the hello was older than an OpenSegment whose
        answer a Fence has overtaken: a new hello names the new one."""
        storage.retry_at = self._state.now + SEGMENT_RETRY_S
        if isinstance(message, OperationFailed) and message.reason == "segment":
            storage.segment, storage.listed_to, storage.named = None, 0, []
            self._state.send(storage.key, HelloWanted())

    def _map(self, segment: SegmentInfo, worker: WorkerPeer) -> None:
        def mapped(message: object) -> None:
            worker.mapping.discard(segment.epoch)
            if isinstance(message, OperationFailed):
                self._state.counters["map_failed"] += 1
                self._retry(segment.storage_id)
            else:
                worker.mapped[segment.epoch] = getattr(message, "session", 0)
                storage = self.storages.get(segment.storage_id)
                if storage is not None:  # maybe a new process: then the segment is an old one's, to be dropped
                    storage.holders.add((worker.key, segment.epoch))
                self.advance()

        worker.mapping.add(segment.epoch)
        self._state.operations.start(
            Control(on_done=mapped), MapSegment(self._state.operations.new_id(), segment), [worker.key]
        )

    def _retry(self, storage_id: str) -> None:
        """A worker didn't map or drop a segment: it is told again after a while."""
        storage = self.storages.get(storage_id)
        if storage is not None:
            storage.retry_at = min(storage.retry_at, self._state.now + SEGMENT_RETRY_S)

    def _drop_old(self, storage: StoragePeer, group: list[WorkerPeer], keep: int) -> None:
        """Tell the workers to unmap the storage's segments other than `keep`: they count against its budget."""
        for worker in group:
            for holder in sorted(storage.holders):
                if holder[0] == worker.key and holder[1] != keep and holder not in storage.dropping:
                    self._drop(storage, worker, holder)

    def _drop(self, storage: StoragePeer, worker: WorkerPeer, holder: tuple[PeerKey, int]) -> None:
        def dropped(message: object) -> None:
            storage.dropping.discard(holder)
            if isinstance(message, OperationFailed):
                self._retry(storage.key.identity)
            else:
                storage.holders.discard(holder)
                self.advance()

        storage.dropping.add(holder)
        worker.mapped.pop(holder[1], None)
        message = DropSegment(self._state.operations.new_id(), storage.key.identity, holder[1])
        self._state.operations.start(Control(on_done=dropped), message, [worker.key])

    def _withdraw_group(self) -> None:
        self._state.workers = []
        self._listener.group_withdrawn()

    def expire(self) -> None:
        """Ask again where a segment was refused, or where a writer never fenced; forget who doesn't come back."""
        for storage in list(self.storages.values()):
            if self._forget_at(storage) <= self._state.now:
                self._forget(storage)
            elif storage.retry_at <= self._state.now:
                storage.retry_at = float("inf")
                self.advance()

    def next_deadline(self) -> float:
        """The earliest of those."""
        first = float("inf")
        for each in self.storages.values():
            first = min(first, min(each.retry_at, self._forget_at(each)))
        return first

    def _forget_at(self, storage: StoragePeer) -> float:
        return float("inf") if storage.up else storage.lost_at + self._state.settings.forget_storage_s

    def _forget(self, storage: StoragePeer) -> None:
        """Its pool and spans go. Should it come back, it gets a fresh segment: who writes into this one isn't known."""
        self._state.counters["storages_forgotten"] += 1
        del self.storages[storage.key.identity]
        self._forgotten.append(storage.key)
        self._fences.pop(storage.key, None)
        self._listener.storage_replaced(storage.key)
        for worker in self.workers.values():
            for holder in sorted(storage.holders):
                if holder[0] == worker.key and worker.up and holder not in storage.dropping:
                    self._drop(storage, worker, holder)
