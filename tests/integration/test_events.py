"""EVENT-01 with a real stack: what a subscriber knows is what the stack has."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from msgspec.structs import replace

from kvtide.events.block_map import BlockMap
from kvtide.events.subscription import Subscription
from kvtide.stack import CHECKOUT, Stack, running_stack
from shared.config import Events, encode_config
from shared.messages.events import block_hash
from shared.packed import pack
from shared.page_hash import chain
from tests.integration.harness import PAGE_TOKENS, READY_TIMEOUT_S, ask, ask_each, prompt, settle, small_config

pytestmark = pytest.mark.asyncio(loop_scope="session")

WAIT_S = 10.0


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stack(module_folder: Path) -> AsyncIterator[Stack]:
    events = Events(f"ipc://{module_folder}/events.sock", f"ipc://{module_folder}/replay.sock")
    async with running_stack(replace(small_config(module_folder), events=events)) as running:
        await running.wait_ready(READY_TIMEOUT_S)
        yield running


class Follower:
    """A subscriber from the start to the end."""

    def __init__(self, stack: Stack) -> None:
        self.known = BlockMap()
        self._subscription = Subscription(stack.config.events)
        self._task = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        async for events in self._subscription.batches():
            self.known.apply(events)

    async def until_it_knows(self, status: dict) -> None:  # type: ignore[type-arg]
        """Wait until the map's pages are the stack's; fails with both when they don't become so."""
        pools = status["host"].values()
        expected = {
            "GPU": status["device"]["evictable"] + status["device"]["protected"],
            "CPU_PINNED": sum(pool["cached"] for pool in pools),
        }
        deadline = asyncio.get_running_loop().time() + WAIT_S
        while {tier: self.known.pages()[tier] for tier in expected} != expected:
            assert asyncio.get_running_loop().time() < deadline, f"{self.known.pages()} is known, {expected} is true"
            assert not self._task.done(), self._task.result()
            await asyncio.sleep(0.05)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        self._subscription.close()


async def test_event_01_a_subscriber_knows_what_each_tier_has(stack: Stack) -> None:
    follower = Follower(stack)
    await ask_each(stack, range(8))  # more than the device holds
    await follower.until_it_knows(await settle(stack))
    pages = follower.known.pages()
    assert pages["GPU"] < pages["CPU_PINNED"] == pages["DISK"]
    await ask_each(stack, [0, 1])  # loaded back: others leave the device
    await follower.until_it_knows(await settle(stack))
    await follower.close()
    late = Follower(stack)  # has the same from the replay alone
    await late.until_it_knows(await settle(stack))
    assert late.known.pages() == follower.known.pages()
    await late.close()


async def test_event_01_hashes_are_those_of_the_tokens(stack: Stack) -> None:
    tokens = [7 * n % 1000 + 300 for n in range(6 * PAGE_TOKENS + 1)]
    await ask(stack, tokens)
    follower = Follower(stack)
    await follower.until_it_knows(await settle(stack))
    digests = list(chain(b"", pack(tokens), PAGE_TOKENS))
    assert all(block_hash(digest) in follower.known for digest in digests)
    await follower.close()


async def test_event_01_the_command_shows_the_map_and_a_new_scheduler_starts_a_new_one(stack: Stack) -> None:
    await ask(stack, prompt(3))
    follower = Follower(stack)
    await follower.until_it_knows(await settle(stack))
    shown = await run_command(stack, "events", "--once")
    assert shown.startswith(f"pages: GPU {follower.known.pages()['GPU']}  CPU_PINNED")
    assert "Text 3." in shown
    lines = [json.loads(line) for line in (await run_command(stack, "events", "--once", "--json")).splitlines()]
    assert {line["event"] for line in lines} == {"AllBlocksCleared", "BlockStored", "BlockRemoved"}
    stack.kill("scheduler-0", 9)
    await asyncio.sleep(0.5)
    await stack.wait_ready(READY_TIMEOUT_S)
    await ask(stack, prompt(5))
    await follower.until_it_knows(await settle(stack))
    await follower.close()


async def run_command(stack: Stack, *arguments: str) -> str:
    """What a `kvtide` command prints."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvtide.cli", *arguments, *_overrides(stack), cwd=CHECKOUT, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0
    return output.decode()


def _overrides(stack: Stack) -> list[str]:
    config = json.loads(encode_config(stack.config))
    keys = [("events", "endpoint"), ("events", "replay_endpoint"), ("model", "path")]
    return [part for section, key in keys for part in ("--set", f"{section}.{key}={config[section][key]}")]
