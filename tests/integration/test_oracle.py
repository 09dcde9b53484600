"""Wrong pages: what the oracle sees without checksums, and that nothing wrong gets through with them."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from kvtide.chat_client import Answer
from kvtide.oracle_process import Oracle
from kvtide.private_folder import private_folder
from kvtide.stack import Stack, running_stack
from shared import test_hooks
from tests.integration.harness import PAGE_TOKENS, READY_TIMEOUT_S, ask, ask_each, prompt, settle, small_config
from tests.integration.page_bytes import HostPages, flip_in_file

pytestmark = pytest.mark.asyncio(loop_scope="session")

DAMAGED = 3  # index of the damaged page in its prompt
REFUSED = "load_failed_checksum"  # the scheduler's counter
EVICTORS = range(20, 24)  # prompts that together fill the device pool


class Unchecked:
    """A stack without checksums, and the folder of its test hooks."""

    def __init__(self, stack: Stack, hooks: Path) -> None:
        self.stack = stack
        self.hooks = hooks


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def unchecked(module_folder: Path) -> AsyncIterator[Unchecked]:
    """A stack that trusts its pages."""
    hooks = module_folder / "hooks"
    hooks.mkdir()
    config = small_config(module_folder, checksums=False)
    async with running_stack(config, {"KVTIDE_TEST_HOOKS": str(hooks)}) as stack:
        await stack.wait_ready(READY_TIMEOUT_S)
        yield Unchecked(stack, hooks)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def checked() -> AsyncIterator[Stack]:
    """A stack that checks its pages."""
    with private_folder("kvtide-test-") as folder:
        async with running_stack(small_config(folder)) as stack:
            await stack.wait_ready(READY_TIMEOUT_S)
            yield stack


async def put_on_host(stack: Stack, number: int) -> Answer:
    """Ask a prompt, wait until its pages are on the host, and push them from the device."""
    answer = await ask(stack, prompt(number))
    await settle(stack)
    await ask_each(stack, EVICTORS)
    await settle(stack)
    return answer


async def test_every_tier_gives_back_what_was_computed(checked: Stack, oracle: Oracle) -> None:
    first = await put_on_host(checked, 0)
    again = await ask(checked, prompt(0))
    assert again.host_tokens >= DAMAGED * PAGE_TOKENS
    assert again.tokens == first.tokens
    verdict = await oracle.check([first.emitted, again.emitted])
    assert (verdict.wrong, verdict.checked) == (0, len(first.tokens) + len(again.tokens))


async def test_without_checksums_the_oracle_sees_a_swapped_page(unchecked: Unchecked, oracle: Oracle) -> None:
    stack = unchecked.stack
    other, first = await ask(stack, prompt(2)), await put_on_host(stack, 1)
    pages = HostPages(stack.config)
    with pages.swapped(pages.page(first.prompt, DAMAGED), pages.page(other.prompt, DAMAGED)):
        again = await ask(stack, prompt(1))
    assert again.host_tokens > DAMAGED * PAGE_TOKENS
    assert (await oracle.check([first.emitted])).wrong == 0
    assert (await oracle.check([again.emitted])).wrong > 0


async def test_without_checksums_the_oracle_sees_a_skipped_layer(unchecked: Unchecked, oracle: Oracle) -> None:
    stack = unchecked.stack
    first = await put_on_host(stack, 3)
    hook = unchecked.hooks / "worker_skip_layer"
    test_hooks.arm(unchecked.hooks, hook.name, "skip")
    again = await ask(stack, prompt(3))
    assert not hook.exists(), "no layer was loaded"
    assert again.host_tokens > 0
    assert (await oracle.check([first.emitted])).wrong == 0
    assert (await oracle.check([again.emitted])).wrong > 0


async def test_with_checksums_a_swapped_page_is_refused(checked: Stack, oracle: Oracle) -> None:
    other, first = await ask(checked, prompt(5)), await put_on_host(checked, 4)
    pages = HostPages(checked.config)
    with pages.swapped(pages.page(first.prompt, DAMAGED), pages.page(other.prompt, DAMAGED)):
        await _assert_refused(checked, oracle, prompt(4))


async def test_with_checksums_a_flipped_bit_in_the_segment_is_refused(checked: Stack, oracle: Oracle) -> None:
    first = await put_on_host(checked, 6)
    pages = HostPages(checked.config)
    with pages.flipped(pages.page(first.prompt, DAMAGED)):
        await _assert_refused(checked, oracle, prompt(6))


async def test_with_checksums_a_flipped_bit_in_a_file_is_refused(folder: Path, oracle: Oracle) -> None:
    config = small_config(folder)
    async with running_stack(config) as stack:
        await stack.wait_ready(READY_TIMEOUT_S)
        first = await ask(stack, prompt(7))
        await settle(stack)
    flip_in_file(config, first.prompt, DAMAGED)
    async with running_stack(config) as stack:
        await stack.wait_ready(READY_TIMEOUT_S)
        again = await ask(stack, prompt(7))
        status = await settle(stack)
    assert again.storage_tokens == DAMAGED * PAGE_TOKENS
    assert status["counters"]["prefetch_corrupt_pages"] == 1
    assert (await oracle.check([first.emitted, again.emitted])).wrong == 0


async def _assert_refused(stack: Stack, oracle: Oracle, text: str) -> None:
    """The prompt's load is refused, once, and its answer is right all the same."""
    before = (await settle(stack))["counters"].get(REFUSED, 0)
    answer = await ask(stack, text)
    after = (await settle(stack))["counters"].get(REFUSED, 0)
    assert after == before + 1
    assert (await oracle.check([answer.emitted])).wrong == 0
