"""A service dies, or stops, in the middle of traffic: nothing wrong is emitted, nothing hangs, nothing leaks."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from msgspec.structs import replace

from kvtide.child import StackError
from kvtide.oracle_process import Oracle
from kvtide.stack import Stack, is_idle, running_stack
from services.scheduler.core.peers import FENCE_TIMEOUT_S
from services.scheduler.core.settings import MAX_SENDS, TRANSFER_TIMEOUT_S
from shared import test_hooks
from tests.faults.traffic import PROMPTS, Traffic, traffic
from tests.integration.harness import READY_TIMEOUT_S, ask, prompt, small_config

pytestmark = pytest.mark.asyncio(loop_scope="session")

RECOVERY_S = 30.0  # the promise: 30 s after a fault nothing is locked, in flight or quarantined
REQUEST_TIMEOUT_S = 25.0  # the stack's; shorter than the stop of the worker
STOPPED_S = max(FENCE_TIMEOUT_S, MAX_SENDS * TRANSFER_TIMEOUT_S, REQUEST_TIMEOUT_S) + 5.0
SERVICES = ("gateway-0", "scheduler-0", "gpu_worker-0", "storage-0")


class Faulty:
    """A stack, and the folder of its test hooks."""

    def __init__(self, stack: Stack, hooks: Path) -> None:
        self.stack = stack
        self.hooks = hooks


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def faulty(module_folder: Path) -> AsyncIterator[Faulty]:
    """One stack for all faults: each must leave it as good as new."""
    hooks = module_folder / "hooks"
    hooks.mkdir()
    config = small_config(module_folder)
    config = replace(config, scheduler=replace(config.scheduler, request_timeout_s=REQUEST_TIMEOUT_S))
    async with running_stack(config, {"KVTIDE_TEST_HOOKS": str(hooks)}) as stack:
        await stack.wait_ready(READY_TIMEOUT_S)
        yield Faulty(stack, hooks)


async def assert_recovered(stack: Stack) -> None:
    """Ready and holding nothing within RECOVERY_S, and it serves."""
    deadline = time.monotonic() + RECOVERY_S
    status: dict[str, object] = {}
    while not (status and status["ready"] and is_idle(status)):
        assert time.monotonic() < deadline, f"not recovered after {RECOVERY_S:g} s: {status}"
        try:
            status = await stack.status()
        except StackError:
            continue  # the scheduler is just being started again; this took its 3 s
    assert status["integrity"] == "ok"
    await stack.wait_ready(READY_TIMEOUT_S)


async def assert_right(running: Traffic, oracle: Oracle) -> None:
    """Everything that reached a client."""
    verdict = await oracle.check(running.emitted)
    assert verdict.wrong == 0
    assert verdict.checked > 0


@pytest.mark.parametrize(("place", "identity"), list(enumerate(SERVICES)))
async def test_kill_9_in_mid_traffic(faulty: Faulty, oracle: Oracle, place: int, identity: str) -> None:
    stack = faulty.stack
    killed = stack.pids[identity]
    async with traffic(stack, first=PROMPTS * place) as running:
        await running.wait_for_tokens()
        stack.kill(identity, signal.SIGKILL)
        outcomes = await running.end()
        if identity == "storage-0":
            assert outcomes == ["answered"] * len(outcomes), "a lost tier costs time, never an answer"
        await assert_recovered(stack)
        await assert_right(running, oracle)
    assert stack.pids[identity] != killed
    again = await ask(stack, prompt(PROMPTS * place))
    assert (await oracle.check([again.emitted])).wrong == 0


def _wait_until_stopped(process: psutil.Process) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while process.status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline, "the hook was never reached"
        time.sleep(0.02)


@pytest.mark.timeout(240)
async def test_a_worker_that_stops_in_a_copy_past_every_deadline(faulty: Faulty, oracle: Oracle) -> None:
    stack = faulty.stack
    worker = psutil.Process(stack.pids["gpu_worker-0"])
    async with traffic(stack, first=PROMPTS * len(SERVICES)) as running:
        await running.wait_for_tokens()
        test_hooks.arm(faulty.hooks, "worker_write", "stop")
        await asyncio.to_thread(_wait_until_stopped, worker)
        await asyncio.sleep(STOPPED_S)  # the fault itself: a stop of this length
        os.kill(worker.pid, signal.SIGCONT)
        await running.end()
        await assert_recovered(stack)
        await assert_right(running, oracle)
    again = await ask(stack, prompt(PROMPTS * len(SERVICES)))
    assert (await oracle.check([again.emitted])).wrong == 0
