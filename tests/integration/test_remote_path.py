"""A stack whose worker never maps the host pool: pages over ZeroMQ, with real processes, and after losses."""

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from msgspec.structs import replace

from kvtide.chat_client import Answer, RequestError
from kvtide.oracle_process import Oracle
from kvtide.stack import Stack, running_stack
from services.storage.page_server import ALIVE_S, SESSION_S
from tests.integration.harness import PAGE_TOKENS, READY_TIMEOUT_S, ask, ask_each, prompt, settle, small_config

pytestmark = pytest.mark.asyncio(loop_scope="session")

EVICTORS = range(20, 24)  # prompts that together fill the device pool
STOPPED_S = SESSION_S + 3.0


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def remote(module_folder: Path) -> AsyncIterator[Stack]:
    config = small_config(module_folder)
    config = replace(
        config,
        worker=replace(config.worker, host_path="remote"),
        storage=replace(config.storage, pages_endpoint=f"ipc://{config.run_folder}/pages.sock"),
    )
    async with running_stack(config) as stack:
        await stack.wait_ready(READY_TIMEOUT_S)
        yield stack


async def test_host_pages_come_back_and_every_token_is_right(remote: Stack, oracle: Oracle) -> None:
    first = await ask(remote, prompt(0))
    await settle(remote)
    await ask_each(remote, EVICTORS)
    await settle(remote)
    again = await ask(remote, prompt(0))
    status = await settle(remote)
    assert again.host_tokens >= 8 * PAGE_TOKENS
    verdict = await oracle.check([first.emitted, again.emitted])
    assert (verdict.wrong, verdict.checked) == (0, len(first.tokens) + len(again.tokens))
    stats = {peer["role"]: peer["stats"] for peer in status["peers"]}
    assert stats["storage"]["remote_sessions"] == 1
    assert not list(Path(remote.config.storage.segment_folder).glob(f"kvtide.{remote.config.run.name}.*.lock"))


@pytest.mark.parametrize("identity", ["gpu_worker-0", "storage-0"])
async def test_a_killed_side_costs_time_and_no_token(remote: Stack, oracle: Oracle, identity: str) -> None:
    number = 1 + len(identity)
    first = await ask(remote, prompt(number))
    await settle(remote)
    remote.kill(identity, signal.SIGKILL)
    again = await _ask_until_answered(remote, number)
    await remote.wait_ready(READY_TIMEOUT_S)
    await settle(remote)
    verdict = await oracle.check([first.emitted, again.emitted])
    assert (verdict.wrong, verdict.checked) == (0, len(first.tokens) + len(again.tokens))
    last = await ask(remote, prompt(number))
    assert last.device_tokens + last.host_tokens + last.storage_tokens >= 8 * PAGE_TOKENS


async def test_a_worker_that_was_stopped_for_longer_than_its_session_joins_again(remote: Stack) -> None:
    await settle(remote)
    remote.kill("gpu_worker-0", signal.SIGSTOP)
    await asyncio.sleep(STOPPED_S)
    remote.kill("gpu_worker-0", signal.SIGCONT)
    await remote.wait_ready(READY_TIMEOUT_S)
    await asyncio.sleep(2 * ALIVE_S)  # what its first messages are answered with has come
    await _ask_until_answered(remote, 18)
    await settle(remote)
    await ask_each(remote, EVICTORS)
    await settle(remote)
    again = await ask(remote, prompt(18))
    assert again.host_tokens >= 8 * PAGE_TOKENS
    stats = {peer["role"]: peer["stats"] for peer in (await settle(remote))["peers"]}
    assert stats["storage"]["remote_sessions"] == 1


async def _ask_until_answered(stack: Stack, number: int) -> Answer:
    async with asyncio.timeout(READY_TIMEOUT_S):
        while True:
            try:
                return await ask(stack, prompt(number))
            except RequestError as error:
                if not error.retryable:
                    raise
                await asyncio.sleep(0.5)
