"""The storage service: one backend, a lease for each scheduler identity, how it starts and stops."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from services.storage.backend import REFRESH_S, Backend
from services.storage.backends import make_backend
from services.storage.host_pool import HostPool
from services.storage.lease import Lease
from services.storage.page_server import PageServer
from shared.config import Config
from shared.segments import OwnedSegment

WATCH_S = 1.0  # between two looks at the lock files: as fast as a missed heartbeat is noticed
SHUTDOWN_S = 5.0  # a supervisor kills after 10 s

log = logging.getLogger("kvtide.storage")


async def serve(config: Config, identity: str, stop: asyncio.Event) -> None:
    """Run a storage service until `stop` is set. Raises KvtideError when it can't start or is refused."""
    service = await make_service(config, identity)
    await service.run(stop)


async def make_service(config: Config, identity: str) -> "StorageService":
    """A service with its memory and its files ready. Raises KvtideError when they can't be."""
    endpoints = config.storage.endpoints() or {"": [config.scheduler_endpoint]}
    pools = {scheduler: _make_pool(config, identity, scheduler, len(endpoints)) for scheduler in endpoints}
    backend = make_backend(config, identity)
    await backend.start()
    stats = backend.stats()
    log.info("backend_ready id=%s files=%d", backend.info.backend_id, stats.get("l3_files", 0))
    service = StorageService(identity, backend, config.storage.pages_endpoint, config.storage.pages_advertise)
    for scheduler, pool in pools.items():
        service.add_lease(scheduler, pool, endpoints[scheduler])
    return service


def _make_pool(config: Config, identity: str, scheduler: str, share: int) -> HostPool:
    name = f"{identity}-{scheduler}" if scheduler else identity
    pool = HostPool(Path(config.storage.segment_folder), name, config.run.name, config.cache.host_bytes // share)
    pool.start()
    return pool


class StorageService:
    """Everything here happens in the event loop; page bytes move in the backend's threads."""

    def __init__(self, identity: str, backend: Backend, pages_endpoint: str, pages_advertise: str = "") -> None:
        """pages_endpoint: serves the pools to workers that can't map them; "" = to nobody. pages_advertise: as in the
        configuration."""
        self.identity = identity
        self.backend = backend
        self.leases: list[Lease] = []
        self.pages = PageServer(pages_endpoint, self._open_segment, pages_advertise) if pages_endpoint else None

    def add_lease(self, scheduler: str, pool: HostPool, endpoints: list[str]) -> None:
        """Give a scheduler identity its range of the memory, and connect to its processes."""
        if self.pages is not None:
            pool.remote_holders = self.pages.holders
        lease = Lease(self.identity, scheduler, self.backend, pool, self.pages, self._stats)
        for endpoint in endpoints:
            lease.connect(endpoint)
        self.leases.append(lease)

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set. Raises ProtocolError when a scheduler refuses this process."""
        work = [branch.link.run() for lease in self.leases for branch in lease.branches]
        work += [self._every(WATCH_S, self._watch), self._every(REFRESH_S, self.backend.refresh), self._end(stop)]
        if self.pages is not None:
            work.append(self.pages.run())
        tasks = [asyncio.create_task(each) for each in work]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await self._shut_down(tasks)
        for task in done:
            task.result()

    def _stats(self) -> dict[str, float]:
        return {**self.backend.stats(), **(self.pages.stats() if self.pages else {})}

    def _open_segment(self, epoch: int) -> OwnedSegment | None:
        segments = [lease.pool.current for lease in self.leases]
        return next((segment for segment in segments if segment is not None and segment.epoch == epoch), None)

    async def _watch(self) -> None:
        for lease in self.leases:
            lease.watch()

    async def _every(self, seconds: float, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(seconds)
            await work()

    async def _end(self, stop: asyncio.Event) -> None:
        await stop.wait()

    async def _shut_down(self, tasks: list[asyncio.Task[None]]) -> None:
        # 1. No transfer goes on; one that hangs in its disk is left behind.
        quiesce = asyncio.gather(*(lease.operations.quiesce() for lease in self.leases))
        try:
            await asyncio.wait_for(quiesce, SHUTDOWN_S)
        except TimeoutError:
            log.warning("shutdown_left_transfers count=%d", sum(len(lease.operations) for lease in self.leases))
        # 2. No message comes or goes.
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        if self.pages is not None:
            self.pages.close()
        # 3. Files and memory.
        await self.backend.close()
        for lease in self.leases:
            lease.pool.close()
