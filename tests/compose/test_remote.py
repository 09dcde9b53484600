"""compose.remote.yaml: no shared volume, pages over ZeroMQ, and every token right."""

import pytest

from kvtide.oracle_process import Oracle
from tests.compose.harness import Compose
from tests.integration.harness import PAGE_TOKENS, prompt

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(1800)]

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
