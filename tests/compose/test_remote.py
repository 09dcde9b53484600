"""compose.remote.yaml: no shared volume, pages over ZeroMQ, and every token right."""

import asyncio

import pytest

from kvtide.oracle_process import Oracle
from services.storage.page_server import SESSION_S
from tests.compose.harness import Compose, run
from tests.integration.harness import PAGE_TOKENS, prompt

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(1800)]

CUT_S = SESSION_S + 3.0  # the storage ends the worker's session, and neither side hears of it
BEAT_S = 8.0  # an idle storage tells its numbers every 5 s
PROMPTS = range(10, 16)  # together more than the device pool


async def test_pages_come_back_over_the_network_and_every_token_is_right(remote: Compose, oracle: Oracle) -> None:
    answers = [await remote.ask(prompt(number)) for number in PROMPTS]
    await remote.settle()
    again = [await remote.ask(prompt(number)) for number in PROMPTS]
    status = await remote.settle()
    assert sum(answer.host_tokens for answer in again) >= 8 * PAGE_TOKENS
    verdict = await oracle.check([answer.emitted for answer in [*answers, *again]])
    assert verdict.wrong == 0
    stats = {peer["role"]: peer["stats"] for peer in status["peers"]}
    assert stats["storage"]["remote_sessions"] == 1
    assert stats["storage"]["remote_put_pages"] > 0
    assert stats["storage"]["remote_got_pages"] > 0


async def test_after_restarts_pages_come_from_the_host_then_from_storage(remote: Compose, oracle: Oracle) -> None:
    first = await remote.ask(prompt(16))
    await remote.settle()
    await remote.restart("gpu_worker")
    from_host = await remote.ask(prompt(16))
    await remote.settle()
    await remote.restart("scheduler", "gpu_worker", "storage")
    from_storage = await remote.ask(prompt(16))
    assert from_host.host_tokens >= 8 * PAGE_TOKENS
    assert from_storage.storage_tokens >= 8 * PAGE_TOKENS
    verdict = await oracle.check([answer.emitted for answer in (first, from_host, from_storage)])
    assert verdict.wrong == 0


async def test_a_storage_that_was_cut_off_comes_back_and_no_token_is_wrong(remote: Compose, oracle: Oracle) -> None:
    first = await remote.ask(prompt(17))
    await remote.settle()
    network = f"{remote.project}_stack"
    [storage] = (await remote.compose("ps", "-q", "storage")).split()
    await remote.restart("gpu_worker")  # so that the prompt's pages are on the host alone
    await run("docker", "network", "disconnect", network, storage)
    try:
        alone = await remote.ask(prompt(17))  # its load fails, and it is computed again
        await asyncio.sleep(CUT_S)
    finally:
        await run("docker", "network", "connect", network, storage)  # under another address, maybe
    number = await _first_backed_up(remote, range(18, 24))
    await remote.restart("gpu_worker")
    again = await remote.ask(prompt(number))
    assert again.host_tokens >= 8 * PAGE_TOKENS
    verdict = await oracle.check([answer.emitted for answer in (first, alone, again)])
    assert verdict.wrong == 0


async def _first_backed_up(remote: Compose, numbers: range) -> int:
    """Ask prompts until one's pages reach the storage; which it was. A dead connection is given up after 15 s."""
    for number in numbers:
        before = await _put_pages(remote)
        await remote.ask(prompt(number))
        await asyncio.sleep(BEAT_S)
        if await _put_pages(remote) > before:
            return number
    raise AssertionError(f"none of {numbers} was backed up: {await remote.status()}")


async def _put_pages(remote: Compose) -> float:
    [storage] = [peer for peer in (await remote.status())["peers"] if peer["role"] == "storage"]
    return float(storage["stats"].get("remote_put_pages", 0))
