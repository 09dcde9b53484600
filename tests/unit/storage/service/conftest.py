"""A real storage service in this process, driven through a real socket."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from services.storage.service import StorageService, make_service
from services.storage.test_hooks import SLOW_READ, VARIABLE
from shared import link, test_hooks
from shared.config import Config, load_config
from shared.geometry import HostLayout
from shared.messages.storage import StorageHello
from shared.segments import MappedSegment, map_segment
from tests.unit.storage.fake_scheduler import STORAGE, FakeScheduler
from tests.unit.storage.pages import GEOMETRY, Page

POOL_PAGES = 64


@dataclass
class Stack:
    """A storage that has said hello, its pool open and mapped as a worker maps it."""

    scheduler: FakeScheduler
    service: StorageService
    hello: StorageHello
    worker: MappedSegment

    def fill(self, pages: list[int], numbers: list[int]) -> None:
        """What a worker writes: the content by number."""
        for page, n in zip(pages, numbers, strict=True):
            self.worker.host_pages.put(page, np.frombuffer(Page(n).bytes, np.uint8))

    def holds(self, page: int, n: int) -> bool:
        """Does a named host page hold content `n`, whole?"""
        name = self.worker.name_of(page)
        return (
            name is not None
            and name.digest == Page(n).digest
            and (name.checksums == Page(n).checksums).all()
            and self.worker.host_pages.get(page).tobytes() == Page(n).bytes
        )


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Config]:
    (tmp_path / "shm").mkdir()
    with tempfile.TemporaryDirectory(prefix="kvtide-") as sockets:  # a socket's path has at most 107 bytes
        yield load_config(
            overrides=[
                "run.name=test",
                f"run.folder={sockets}",
                f"storage.segment_folder={tmp_path / 'shm'}",
                f"storage.folder={tmp_path / 'l3'}",
                "storage.free_floor_bytes=0",
                f"cache.host_bytes={POOL_PAGES * GEOMETRY.page_bytes + 1}",
            ]
        )


@pytest.fixture
def scheduler(config: Config) -> Iterator[FakeScheduler]:
    scheduler = FakeScheduler(config.scheduler_endpoint)
    yield scheduler
    scheduler.close()


@asynccontextmanager
async def running(config: Config) -> AsyncIterator[StorageService]:
    """A service that runs until the block ends."""
    stop = asyncio.Event()
    service = await make_service(config, STORAGE)
    task = asyncio.create_task(service.run(stop))
    try:
        yield service
    finally:
        stop.set()
        await task


@pytest.fixture(autouse=True)
def quick_hello(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first hello is sent before the socket is connected; don't wait half a second for the next."""
    monkeypatch.setattr(link, "HELLO_RETRY_S", 0.02)


@pytest.fixture
def layout() -> HostLayout:
    """Of host pages."""
    return "page_first_direct"


@pytest.fixture
async def stack(config: Config, scheduler: FakeScheduler, layout: HostLayout) -> AsyncIterator[Stack]:
    async with running(config) as service:
        hello = await scheduler.welcome()
        opened = await scheduler.open(geometry=replace(GEOMETRY, layout=layout))
        worker = map_segment(opened.segment, "worker-0", 7)
        yield Stack(scheduler, service, hello, worker)
        worker.close()


@pytest.fixture
def hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for test hooks."""
    folder = tmp_path / "hooks"
    folder.mkdir()
    monkeypatch.setenv(VARIABLE, str(folder))
    return folder


def slow_reads(hooks: Path, seconds: float) -> None:
    """Every page read takes `seconds` longer."""
    test_hooks.arm(hooks, SLOW_READ, str(seconds))
