"""The storage service: its link to the scheduler, what it does with each message, how it starts and stops."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from services.storage.backend import REFRESH_S, Backend, ModelPages
from services.storage.backends import make_backend
from services.storage.host_pool import HostPool
from services.storage.names import adopt, commit, inventory, release
from services.storage.none_backend import NoPages
from services.storage.operations import Operations, RefusedError
from services.storage.page_server import PageServer
from services.storage.transfers import archive, find, prefetch
from shared.config import Config
from shared.errors import CapacityError, StorageError
from shared.link import SchedulerLink
from shared.messages import ToStorage
from shared.messages.common import Cancel, Fence, Message
from shared.messages.storage import (
    AdoptPages,
    ArchivePages,
    CommitPages,
    FindPages,
    ListPages,
    OpenSegment,
    PeerExited,
    PrefetchPages,
    ReleasePages,
    SegmentInfo,
    SegmentOpened,
    StorageHello,
)
from shared.segments import OwnedSegment

CREDITS = 64  # operations in flight: 64 batches keep every I/O thread busy, and bound what queues here
WATCH_S = 1.0  # between two looks at the lock files: as fast as a missed heartbeat is noticed
SHUTDOWN_S = 5.0  # a supervisor kills after 10 s

Naming = CommitPages | ReleasePages | ListPages | AdoptPages
Command = Fence | OpenSegment | Naming | FindPages | PrefetchPages | ArchivePages

NAMING: dict[type, Callable[[OwnedSegment, Any], Message]] = {
    CommitPages: commit,
    ReleasePages: release,
    ListPages: inventory,
    AdoptPages: adopt,
}

log = logging.getLogger("kvtide.storage")


async def serve(config: Config, identity: str, stop: asyncio.Event) -> None:
    """Run a storage service until `stop` is set. Raises KvtideError when it can't start or is refused."""
    service = await make_service(config, identity)
    await service.run(stop)


async def make_service(config: Config, identity: str) -> "StorageService":
    """A service with its memory and its files ready. Raises KvtideError when they can't be."""
    pool = HostPool(Path(config.storage.segment_folder), identity, config.run.name, config.cache.host_bytes)
    pool.start()
    backend = make_backend(config, identity)
    await backend.start()
    stats = backend.stats()
    log.info("backend_ready id=%s files=%d", backend.info.backend_id, stats.get("l3_files", 0))
    endpoint = config.storage.pages_endpoint
    pages = PageServer(endpoint, lambda: pool.current) if endpoint else None
    return StorageService(identity, config.scheduler_endpoint, backend, pool, pages)


class StorageService:
    """Owner of the link. Everything here happens in the event loop; page bytes move in the backend's threads."""

    def __init__(
        self, identity: str, endpoint: str, backend: Backend, pool: HostPool, pages: PageServer | None = None
    ) -> None:
        """pages: serves the pool to workers that can't map it."""
        self.identity = identity
        self.backend = backend
        self.pool = pool
        self.pages = pages
        if pages is not None:
            pool.remote_holders = pages.holders
        self.link = SchedulerLink(endpoint, identity, ToStorage, self)
        self.operations = Operations(self.link.send)
        self._model: ModelPages | None = None  # the part of L3 that belongs to the open segment

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set. Raises ProtocolError when the scheduler refuses this process."""
        tasks = [
            asyncio.create_task(work)
            for work in (
                self.link.run(),
                self._every(WATCH_S, self._watch),
                self._every(REFRESH_S, self.backend.refresh),
            )
        ]
        tasks.append(asyncio.create_task(self._end(stop)))
        if self.pages is not None:
            tasks.append(asyncio.create_task(self.pages.run()))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await self._shut_down(tasks)
        for task in done:
            task.result()

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
            **self.backend.stats(),
            "host_pages_named": segment.named_pages() if segment else 0,
            "host_bytes": segment.size if segment else 0,
            **(self.pages.stats() if self.pages else {}),
            **{f"dropped_{reason}": count for reason, count in self.link.counters.items()},
        }

    def busy(self) -> bool:
        """True while an operation runs."""
        return len(self.operations) > 0

    def on_scheduler(self, epoch: int) -> None:
        """Names stay until this scheduler releases them."""
        log.info("scheduler_up epoch=%d", epoch)
        self.operations.new_scheduler(epoch)

    def on_lost(self) -> None:
        """Running operations go on: the scheduler may come back with its epoch and take their answers again."""

    def on_message(self, message: Cancel | Command) -> None:
        """Carry out a command: those about names at once, the others in tasks of their own."""
        if isinstance(message, Cancel):
            self.operations.cancel(message.target)
        elif self.operations.begin(message.op_id):
            self._carry_out(message)
            self.link.quicken()

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
                operations.start(message.op_id, lambda: self._open(message))
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
        return SegmentOpened(message.op_id, self._describe(segment))

    def _describe(self, segment: OwnedSegment) -> SegmentInfo:
        return replace(segment.info(self.identity), pages_endpoint=self.pages.endpoint if self.pages else "")

    async def _pages_of(self, message: OpenSegment) -> ModelPages:
        try:
            return await self.backend.of_model(message.model_fingerprint, message.geometry)
        except StorageError as error:
            log.warning("l3_unusable detail=%s", error)
            return NoPages()  # the host pool works without L3

    async def _find(self, message: FindPages) -> Message:
        if self._model is None:
            raise RefusedError("segment", "a lookup before any segment is open: it's open that says which model")
        return await find(self._model, message.op_id, message.digests)

    async def _watch(self) -> None:
        self.pool.scan()
        if self.link.up:
            for holder in list(self.pool.exited):
                if self.link.send(PeerExited(holder.identity, holder.epoch, holder.segment_epoch)):
                    self.pool.exited.remove(holder)
                    self.pool.reported.append(holder)
                    log.info("holder_exited identity=%s epoch=%d", holder.identity, holder.epoch)

    async def _every(self, seconds: float, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(seconds)
            await work()

    async def _end(self, stop: asyncio.Event) -> None:
        await stop.wait()

    async def _shut_down(self, tasks: list[asyncio.Task[None]]) -> None:
        # 1. No transfer goes on; one that hangs in its disk is left behind.
        try:
            await asyncio.wait_for(self.operations.quiesce(), SHUTDOWN_S)
        except TimeoutError:
            log.warning("shutdown_left_transfers count=%d", len(self.operations))
        # 2. No message comes or goes.
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        if self.pages is not None:
            self.pages.close()
        # 3. Files and memory.
        await self.backend.close()
        self.pool.close()
