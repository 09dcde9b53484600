"""One scheduler identity's share of a storage: its range of the host memory, its operations, and who leads it.

The memory is cut into equal ranges at the start, one for each scheduler identity. A range is a
segment of its own: a fence, a fresh segment or a stuck writer of one replica never touches the pages of another.
"""

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from services.storage.backend import Backend, ModelPages
from services.storage.host_pool import HostPool
from services.storage.names import adopt, commit, inventory, release
from services.storage.none_backend import NoPages
from services.storage.operations import Operations, RefusedError
from services.storage.page_server import PageServer
from services.storage.transfers import archive, find, prefetch
from shared.errors import CapacityError, StorageError
from shared.link import SchedulerLink
from shared.messages import ToStorage
from shared.messages.common import Cancel, Fence, Message
from shared.messages.storage import (
    AdoptPages,
    ArchivePages,
    BackendChanged,
    ChangeBackend,
    CommitPages,
    FindPages,
    ListPages,
    OpenSegment,
    PagesDropped,
    PeerExited,
    PrefetchPages,
    ReleasePages,
    SegmentInfo,
    SegmentOpened,
    StorageHello,
    Superseded,
)
from shared.segments import OwnedSegment

CREDITS = 64  # operations in flight: 64 batches keep every I/O thread busy, and bound what queues here
DROPPED_BATCH = 4096  # digests in one PagesDropped: 128 KiB on the wire

Naming = CommitPages | ReleasePages | ListPages | AdoptPages
Command = Fence | OpenSegment | Naming | FindPages | PrefetchPages | ArchivePages | ChangeBackend

NAMING: dict[type, Callable[[OwnedSegment, Any], Message]] = {
    CommitPages: commit,
    ReleasePages: release,
    ListPages: inventory,
    AdoptPages: adopt,
}

log = logging.getLogger("kvtide.storage")


class Lease:
    """What a storage does for one scheduler identity. All of it happens in the event loop."""

    def __init__(
        self,
        identity: str,
        scheduler: str,
        backend: Backend,
        pool: HostPool,
        pages: PageServer | None,
        backend_stats: Callable[[], dict[str, float]],
    ) -> None:
        """identity: of the storage. scheduler: whose lease it is, "" = whoever comes. pages: serves the pool."""
        self.identity = identity
        self.scheduler = scheduler
        self.backend = backend
        self.pool = pool
        self.pages = pages
        self.branches: list[Branch] = []
        self.leader: Branch | None = None
        self.operations = Operations(self._send)
        self._backend_stats = backend_stats
        self._model: ModelPages | None = None  # the part of L3 that belongs to the open segment
        self._told: deque[bytes] = deque(maxlen=DROPPED_BATCH)  # pages that it has said L3 has lost, the last ones
        self._tell_again = False  # that may have been lost on the way

    def connect(self, endpoint: str) -> "Branch":
        """A link to a scheduler that may lead. Two of one identity stand by for each other."""
        self.branches.append(Branch(self, endpoint))
        return self.branches[-1]

    def hello(self) -> Message:
        """What the scheduler must know: who may still write into which segment."""
        segment = self.pool.current
        return StorageHello(
            self.identity,
            self.backend.info,
            self._describe(segment) if segment else None,
            self.pool.scan(),
            self.pool.budget,
            CREDITS,
        )

    def stats(self) -> dict[str, float]:
        """For the heartbeat."""
        segment = self.pool.current
        return {
            **self._backend_stats(),
            "host_pages_named": segment.named_pages() if segment else 0,
            "host_bytes": segment.size if segment else 0,
        }

    def admits(self, branch: "Branch", scheduler: str, epoch: int) -> bool:
        """May this scheduler process lead? Not while another of its identity is heard; it takes over from a silent
        one."""
        if self.scheduler not in ("", scheduler):
            self._refuse(branch, epoch, f"it is {scheduler!r}, storage.schedulers says {self.scheduler!r}")
            return False
        leader = self.leader
        if leader not in (None, branch) and leader.link.up:
            if epoch == branch.link.scheduler_epoch:  # it led before
                branch.link.send(Superseded(leader.link.scheduler_epoch))
            self._refuse(branch, epoch, f"scheduler epoch {leader.link.scheduler_epoch} has the lease and is heard")
            return False
        if leader not in (None, branch):
            log.warning("lease_taken_over scheduler=%s epoch=%d", scheduler, epoch)
            leader.link.send(Superseded(epoch))
        self.leader = branch
        return True

    def _refuse(self, branch: "Branch", epoch: int, why: str) -> None:
        if branch.refused != epoch:  # once for each process
            branch.refused = epoch
            log.warning("lease_refused epoch=%d reason=%s", epoch, why)

    def _send(self, message: Message) -> bool:
        return self.leader is not None and self.leader.link.send(message)

    def say_again(self) -> None:
        """What it said without being asked may have been lost."""
        self.pool.report_again()
        self._tell_again = True

    def lead(self, branch: "Branch", epoch: int) -> None:
        """Names stay until this scheduler releases them."""
        if branch.refused:  # its hellos are from before: since then a worker may have mapped the pool
            branch.refused = 0
            branch.link.greet()
        log.info("scheduler_up epoch=%d", epoch)
        self.operations.new_scheduler(epoch)

    def on_message(self, message: Cancel | Command) -> None:
        """Carry out a command: those about names at once, the others in tasks of their own."""
        if isinstance(message, Cancel):
            self.operations.cancel(message.target)
        elif self.operations.begin(message.op_id):
            self._carry_out(message)
            if self.leader is not None:
                self.leader.link.quicken()

    def _carry_out(self, message: Command) -> None:
        operations = self.operations
        match message:
            case Fence():
                operations.fence(message.op_id)
                self.pool.report_again()
            case CommitPages() | ReleasePages() | ListPages() | AdoptPages():
                work = NAMING[type(message)]
                operations.do(message.op_id, lambda: work(self._segment(message.segment_epoch), message))
            case OpenSegment():
                operations.start_opening(message.op_id, lambda: self._open(message))
            case ChangeBackend():
                operations.start(message.op_id, lambda: self._change(message))
            case FindPages():
                operations.start(message.op_id, lambda: self._find(message))
            case PrefetchPages():
                operations.start_transfer(
                    message.op_id,
                    lambda operation: prefetch(
                        *self._both(message.segment_epoch), operation, message,
                        lambda progress: operations.progress(operation, progress),
                    ),
                )  # fmt: skip
            case ArchivePages():
                operations.start_transfer(
                    message.op_id, lambda operation: archive(*self._both(message.segment_epoch), operation, message)
                )

    def _segment(self, epoch: int) -> OwnedSegment:
        segment = self.pool.current
        if segment is None or segment.epoch != epoch:
            raise RefusedError("segment", f"segment {epoch} isn't open, {segment and segment.epoch} is")
        return segment

    def _both(self, segment_epoch: int) -> tuple[ModelPages, OwnedSegment]:
        segment = self._segment(segment_epoch)
        assert self._model is not None
        return self._model, segment

    async def _open(self, message: OpenSegment) -> Message:
        model = await self._pages_of(message)
        try:
            segment = await self.pool.open(
                message.geometry, message.model_fingerprint, fresh=message.fresh, quiesce=self.operations.quiesce
            )
        except CapacityError as error:
            raise RefusedError("full", str(error)) from None
        self._model = model
        self._told.clear()
        return SegmentOpened(message.op_id, self._describe(segment))

    def _describe(self, segment: OwnedSegment) -> SegmentInfo:
        return replace(segment.info(self.identity), pages_endpoint=self.pages.endpoint if self.pages else "")

    async def _pages_of(self, message: OpenSegment) -> ModelPages:
        try:
            return await self.backend.of_model(message.model_fingerprint, message.geometry)
        except StorageError as error:
            log.warning("l3_unusable detail=%s", error)
            return NoPages()  # the host pool works without L3

    async def _change(self, message: ChangeBackend) -> Message:
        """What an administrator wants of L3. A store that several storages share is changed for this one alone, but
        for `clear`."""
        log.info("backend_change change=%s", message.change)
        try:
            match message.change:
                case "attach":
                    await self.backend.attach()
                case "detach":
                    self.backend.detach()
                case "clear":
                    await self.backend.clear()
        except StorageError as error:
            return BackendChanged(message.op_id, str(error))
        return BackendChanged(message.op_id, "")

    async def _find(self, message: FindPages) -> Message:
        if self._model is None:
            raise RefusedError("segment", "a lookup before any segment is open: it's open that says which model")
        return await find(self._model, message)

    def watch(self) -> None:
        """Tell which processes map the pool no more, and which pages L3 has lost."""
        self.pool.scan()
        if self.leader is not None and self.leader.link.up:
            dropped = self._lost_pages(self._model) if self._model is not None else []
            for start in range(0, len(dropped), DROPPED_BATCH):
                self._send(PagesDropped(b"".join(dropped[start : start + DROPPED_BATCH])))
            for holder in list(self.pool.exited):
                if self._send(PeerExited(holder.identity, holder.epoch, holder.segment_epoch, holder.session)):
                    self.pool.exited.remove(holder)
                    self.pool.reported.append(holder)
                    log.info("holder_exited identity=%s epoch=%d", holder.identity, holder.epoch)

    def _lost_pages(self, model: ModelPages) -> list[bytes]:
        """Those to tell of now."""
        again = [digest for digest in self._told if not model.holds(digest)] if self._tell_again else []
        self._tell_again = False
        new = model.take_dropped()
        self._told += new
        return again + new


class Branch:
    """The link to one scheduler process, which leads or stands by."""

    def __init__(self, lease: Lease, endpoint: str) -> None:
        self.refused = 0  # epoch of the process that was refused last
        self._lease = lease
        self.link = SchedulerLink(
            endpoint, lease.identity, ToStorage, self, admits=self._admits, on_missed=lease.say_again
        )

    def _admits(self, scheduler: str, epoch: int) -> bool:
        return self._lease.admits(self, scheduler, epoch)

    def hello(self) -> Message:
        """See Lease."""
        return self._lease.hello()

    def stats(self) -> dict[str, float]:
        """See Lease."""
        return {**self._lease.stats(), **{f"dropped_{reason}": n for reason, n in self.link.counters.items()}}

    def busy(self) -> bool:
        """True while an operation runs."""
        return len(self._lease.operations) > 0

    def on_scheduler(self, epoch: int) -> None:
        """It was admitted."""
        self._lease.lead(self, epoch)

    def on_lost(self) -> None:
        """Running operations go on: the scheduler may come back with its epoch and take their answers again."""

    def on_message(self, message: Cancel | Command) -> None:
        """Only the one that leads is obeyed; an older one that was away hears that its lease is gone."""
        leader = self._lease.leader
        if leader is self:
            self._lease.on_message(message)
        elif leader is not None:
            self.link.send(Superseded(leader.link.scheduler_epoch))
