"""The service as a process of its own."""

import asyncio
import os
import signal
import sys
from pathlib import Path

from services.storage.test_hooks import SLOW_READ, VARIABLE
from shared.config import Config, encode_config
from shared.messages.storage import SegmentOpened
from shared.segment_files import remove_stale_segments
from shared.segments import map_segment
from shared.service import CONFIG_VARIABLE
from tests.unit.storage.fake_scheduler import STORAGE, FakeScheduler

ROOT = Path(__file__).parents[4]


async def start(config: Config, **environment: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.storage", "--identity", STORAGE),
        cwd=ROOT,
        env={**os.environ, CONFIG_VARIABLE: encode_config(config), **environment},
        stderr=asyncio.subprocess.PIPE,
    )


async def test_the_service_does_without_torch() -> None:
    code = "import sys, services.storage.service; sys.exit('torch' in sys.modules)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, cwd=ROOT)
    assert await process.wait() == 0


async def test_sigterm_ends_the_process_in_time_while_a_read_hangs(
    config: Config, scheduler: FakeScheduler, tmp_path: Path
) -> None:
    process = await start(config, **{VARIABLE: str(tmp_path)})
    await scheduler.welcome()
    await scheduler.open()
    await scheduler.ask(scheduler.commit([1], [0]))
    await scheduler.ask(scheduler.archive([1], [0]))
    (tmp_path / SLOW_READ).write_text("60")
    request = scheduler.tell(scheduler.prefetch([2], [0]))
    assert await scheduler.silence(request.op_id)
    process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(8):
        _, log = await process.communicate()
    assert process.returncode == 0
    assert b"shutdown_left_transfers" in log
    assert list((tmp_path / "shm").iterdir()) == []


async def test_a_killed_storage_is_succeeded_by_one_that_removes_what_it_left(
    config: Config, scheduler: FakeScheduler, tmp_path: Path
) -> None:
    process = await start(config)
    await scheduler.welcome()
    opened = await scheduler.open()
    assert isinstance(opened, SegmentOpened)
    worker = map_segment(opened.segment, "worker-0", 7)
    process.kill()
    await process.communicate()
    worker.pages_array[5] = 5
    assert Path(opened.segment.path).exists()
    again = await start(config)
    hello = await scheduler.welcome()
    assert (hello.segment, [holder.identity for holder in hello.holders]) == (None, ["worker-0"])
    assert not Path(opened.segment.path).exists()
    assert (worker.pages_array[5] == 5).all()
    worker.close()
    again.send_signal(signal.SIGTERM)
    await again.communicate()
    assert again.returncode == 0
    assert remove_stale_segments(tmp_path / "shm", "test", STORAGE) == []


async def test_a_second_storage_of_one_identity_is_refused(config: Config, scheduler: FakeScheduler) -> None:
    process = await start(config)
    await scheduler.welcome()
    await scheduler.open()
    second = await start(config)
    _, log = await second.communicate()
    assert second.returncode == 1
    assert b"is running" in log
    process.send_signal(signal.SIGTERM)
    await process.communicate()
