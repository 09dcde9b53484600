"""The profiles of compose.yaml that keep L3 in another project's store."""

import pytest

from kvtide.oracle_process import Oracle
from tests.compose.harness import Compose
from tests.integration.harness import PAGE_TOKENS, prompt

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(2400)]

PROMPTS = range(4)


@pytest.mark.parametrize("store", ["lmcache", "mooncake"], indirect=True)
async def test_after_all_restarts_pages_come_from_the_store(
    store: Compose, oracle: Oracle, request: pytest.FixtureRequest
) -> None:
    kind = request.node.callspec.params["store"]
    first = [await store.ask(prompt(number)) for number in PROMPTS]
    await store.settle()
    await store.restart("scheduler", "gpu_worker", f"storage_{kind}")
    again = [await store.ask(prompt(number)) for number in PROMPTS]
    assert sum(answer.storage_tokens for answer in again) >= 8 * PAGE_TOKENS
    assert [answer.tokens for answer in again] == [answer.tokens for answer in first]
    verdict = await oracle.check([answer.emitted for answer in [*first, *again]])
    assert (verdict.wrong, verdict.checked) == (0, 2 * sum(len(answer.tokens) for answer in first))
    [storage] = [peer for peer in (await store.settle())["peers"] if peer["role"] == "storage"]
    assert storage["identity"] == f"storage_{kind}-1"
    assert storage["stats"]["l3_get_pages"] > 0
