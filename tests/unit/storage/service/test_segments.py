"""Segments over a service's life: replaced, mapped, left behind; and processes that die."""

import asyncio
import sys
import time
from pathlib import Path

import msgspec
import pytest

from services.storage import host_pool, memory_room
from services.storage import service as service_module
from shared.config import Config
from shared.errors import CapacityError
from shared.geometry import PageGeometry
from shared.messages.common import OperationFailed
from shared.messages.storage import PeerExited, SegmentOpened
from shared.segment_files import list_holders
from shared.segments import map_segment
from tests.unit.storage.fake_scheduler import STORAGE, FakeScheduler
from tests.unit.storage.pages import GEOMETRY, put
from tests.unit.storage.service.conftest import Stack, running, slow_reads

HOLD = """
import sys, time
import msgspec
from shared.messages.storage import SegmentInfo
from shared.segments import map_segment
segment = map_segment(msgspec.msgpack.decode(bytes.fromhex(sys.argv[1]), type=SegmentInfo), "worker-1", 8)
print("mapped", flush=True)
time.sleep(60)
"""


async def test_a_killed_workers_exit_is_reported_once(stack: Stack) -> None:
    scheduler = stack.scheduler
    text = msgspec.msgpack.encode(scheduler.segment).hex()
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", HOLD, text, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"mapped\n"
        hello = await scheduler.restart()
        assert {holder.identity for holder in hello.holders} == {"worker-0", "worker-1"}
    finally:
        process.kill()
        await process.wait()
    exited = await scheduler.receive(lambda message: isinstance(message, PeerExited), timeout_s=3)
    assert exited == PeerExited("worker-1", 8, scheduler.segment.epoch)
    with pytest.raises(TimeoutError):
        await scheduler.receive(lambda message: isinstance(message, PeerExited), timeout_s=1.5)


async def test_a_worker_that_unmaps_is_reported_too(stack: Stack) -> None:
    await stack.scheduler.restart()
    stack.worker.close()
    exited = await stack.scheduler.receive(lambda message: isinstance(message, PeerExited), timeout_s=3)
    assert exited.identity == "worker-0"


async def test_a_fresh_segment_waits_for_the_old_ones_memory(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pool, "UNMAP_WAIT_S", 0.2)
    scheduler, old = stack.scheduler, stack.scheduler.segment
    failed = await scheduler.open(fresh=True)
    assert isinstance(failed, OperationFailed)
    assert failed.reason == "full"
    assert (await scheduler.open()).segment == old
    stack.worker.close()
    opened = await scheduler.open(fresh=True)
    assert isinstance(opened, SegmentOpened)
    assert opened.segment.epoch > old.epoch
    assert not Path(old.path).exists()
    map_segment(opened.segment, "worker-0", 7).close()


async def test_another_models_segment_replaces_the_old_one_once_it_is_unmapped(stack: Stack) -> None:
    scheduler, old = stack.scheduler, stack.scheduler.segment
    asyncio.get_running_loop().call_later(0.2, stack.worker.close)
    start_s = time.monotonic()
    other = PageGeometry(32, 2, GEOMETRY.parts)
    opened = await scheduler.open(geometry=other, model=b"o" * 32)
    assert time.monotonic() - start_s >= 0.2
    assert (opened.segment.geometry, opened.segment.pages) == (other, old.pages // 2)


async def test_a_replaced_segments_transfers_end_first(stack: Stack, hooks: Path) -> None:
    scheduler = stack.scheduler
    await put(stack.service.leases[0]._model, *range(4))
    slow_reads(hooks, 0.3)
    request = scheduler.tell(scheduler.prefetch([1, 2, 3, 4], range(4)))
    stack.worker.close()
    opened = await scheduler.open(fresh=True)
    assert isinstance(opened, SegmentOpened)
    assert (await scheduler.receive(lambda message: getattr(message, "op_id", 0) == request.op_id)) is not None
    assert stack.service.leases[0].stats()["host_pages_named"] == 0


async def test_host_02_a_pool_too_small_for_a_page_is_refused(stack: Stack) -> None:
    big = PageGeometry(1024, 64, GEOMETRY.parts)
    stack.worker.close()
    failed = await stack.scheduler.open(geometry=big)
    assert isinstance(failed, OperationFailed)
    assert failed.reason == "full"


async def test_host_02_a_budget_that_can_never_be_met_is_refused_at_start(config: Config) -> None:
    cache = msgspec.structs.replace(config.cache, host_bytes=2**60)
    with pytest.raises(CapacityError, match=r"cache\.host_bytes is 1152921504606846976 and .* can have \d+ bytes"):
        async with running(msgspec.structs.replace(config, cache=cache)):
            await asyncio.sleep(0.5)


async def test_host_02_memory_that_is_taken_by_others_is_respected(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_pool, "available_memory", lambda: 1000)
    stack.worker.close()
    failed = await stack.scheduler.open(fresh=True)
    assert failed.reason == "full"
    monkeypatch.undo()
    assert isinstance(await stack.scheduler.open(), SegmentOpened)


def test_host_02_a_containers_limit_counts(tmp_path: Path) -> None:
    assert memory_room.memory_limit(tmp_path) is None
    assert memory_room.available_memory(tmp_path) > 0
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_room.memory_limit(tmp_path) is None
    (tmp_path / "memory.max").write_text("100000\n")
    (tmp_path / "memory.current").write_text("70000\n")
    (tmp_path / "memory.stat").write_text("anon 20000\ninactive_file 3000\nactive_file 2000\n")
    assert memory_room.available_memory(tmp_path) == 35000


async def test_a_successor_starts_empty_and_counts_what_is_still_mapped(
    config: Config, scheduler: FakeScheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_pool, "UNMAP_WAIT_S", 0.2)
    async with running(config) as first:
        await scheduler.welcome()
        info = (await scheduler.open()).segment
        first.leases[0].pool.current.close()  # as if it had been killed: nothing is unlinked
        first.leases[0].pool.current = None
        worker = map_segment(info, "worker-0", 7)
    async with running(config):
        hello = await scheduler.welcome()
        assert hello.segment is None
        assert [holder.segment_epoch for holder in hello.holders] == [info.epoch]
        assert not Path(info.path).exists()
        worker.pages_array[1] = 1
        assert (await scheduler.open()).reason == "full"
        worker.close()
        assert isinstance(await scheduler.open(), SegmentOpened)
    assert list((tmp_path / "shm").iterdir()) == []


async def test_shutdown_leaves_only_the_locks_of_the_living(
    config: Config, scheduler: FakeScheduler, tmp_path: Path
) -> None:
    async with running(config):
        await scheduler.welcome()
        info = (await scheduler.open()).segment
        worker = map_segment(info, "worker-0", 7)
    assert [path.suffix for path in (tmp_path / "shm").iterdir()] == [".lock"]
    worker.pages_array[1] = 1
    worker.close()
    assert list_holders(tmp_path / "shm", "test", STORAGE) == ([], [])
    assert list((tmp_path / "shm").iterdir()) == []


async def test_shutdown_is_bounded_while_a_read_hangs(
    config: Config, scheduler: FakeScheduler, hooks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "SHUTDOWN_S", 0.3)
    async with running(config) as service:
        await scheduler.welcome()
        await scheduler.open()
        await put(service.leases[0]._model, 0)
        slow_reads(hooks, 2)
        request = scheduler.tell(scheduler.prefetch([1], [0]))
        assert await scheduler.silence(request.op_id)
        start_s = time.monotonic()
    assert time.monotonic() - start_s < 1.5
