"""The worker as a process of its own: start, work, SIGTERM."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shared.config import Config, encode_config
from shared.link import new_epoch
from shared.messages.worker import MapSegment, RunStep, SegmentMapped, StepDone
from shared.segment_files import list_holders
from shared.segments import create_segment
from tests.unit.gpu_worker.service.fake_scheduler import FakeScheduler, item

START_S = 60.0  # importing torch takes 2 s on a quiet machine


@pytest.fixture
async def scheduler(config: Config) -> AsyncIterator[FakeScheduler]:
    scheduler = FakeScheduler(config.scheduler_endpoint)
    yield scheduler
    scheduler.close()


async def start(config: Config, hooks: Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.gpu_worker", "--identity", "worker"),
        env={**os.environ, "KVTIDE_CONFIG_JSON": encode_config(config), "KVTIDE_TEST_HOOKS": str(hooks)},
    )


async def test_a_process_serves_and_obeys_sigterm(config: Config, scheduler: FakeScheduler, tmp_path: Path) -> None:
    process = await start(config, tmp_path)
    try:
        hello = await scheduler.welcome(START_S)
        segment = create_segment(
            tmp_path, "storage-0", "test", new_epoch(), hello.geometry, hello.model_fingerprint, pages=4
        )
        mapped = await scheduler.ask(MapSegment(scheduler.op(), segment.info("storage-0")))
        assert isinstance(mapped, SegmentMapped)
        done = await scheduler.ask(RunStep(scheduler.op(), [item(0, [1, 2, 3], [1])], []))
        assert isinstance(done, StepDone)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), START_S) == 0
        assert list_holders(tmp_path, "test", "storage-0") == ([], [])
        segment.close()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_hook_kills_a_process_in_the_middle_of_a_step(
    config: Config, scheduler: FakeScheduler, tmp_path: Path
) -> None:
    process = await start(config, tmp_path)
    try:
        await scheduler.welcome(START_S)
        (tmp_path / "worker_step").write_text("kill")
        scheduler.tell(RunStep(scheduler.op(), [item(0, [1, 2, 3], [1])], []))
        assert await asyncio.wait_for(process.wait(), START_S) == -signal.SIGKILL
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
