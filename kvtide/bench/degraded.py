"""`kvtide bench degraded`: time to first token of a stack that has lost its storage, against one without tiering.

Two stacks run side by side: one without a host tier, and one that has all tiers until its storage service is gone, or
silent, or L3's folder is gone. Once that is noticed both are asked for the same prompts in turn: those that only the
lost tiers had, which are computed anew, and those that the device has.
"""

import asyncio
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from msgspec.structs import replace

from kvtide.bench.rows import Row, plain, times
from kvtide.bench.step import READY_TIMEOUT_S, private
from kvtide.chat_client import Answer, client, complete
from kvtide.child import StackError
from kvtide.private_folder import private_folder
from kvtide.stack import Stack, running_stack, with_model
from kvtide.tiers import geometry_of
from shared.config import Config

PREFIX, NEW = 1024, 64  # tokens
DEVICE_PREFIXES, HOST_PREFIXES = 2, 4  # that the pools hold, each with its end
ROUNDS = 9
FIRST_ROUNDS = 4  # before the loss is noticed
GOAL = 1.1  # times the stack without tiering
SETTLE_S = 0.5  # backup and archive of a prompt take 0.1 s
NOTICE_TIMEOUT_S = 30.0  # three heartbeats that don't come; one that brings the counters
POLL_S = 0.1
STORAGE = "storage-0"
TOKENS = (1000, 40000)  # ordinary tokens of any model with a large vocabulary

Prompt = list[int]


class Loss(NamedTuple):
    """Tiers that are lost."""

    name: str
    carry_out: Callable[[Stack], Awaitable[None]]
    noticed: Callable[[dict[str, Any]], bool]  # looks at what the status says of the storage


async def _gone(stack: Stack) -> None:
    await stack.stop(STORAGE)


async def _silent(stack: Stack) -> None:
    stack.kill(STORAGE, signal.SIGSTOP)


async def _no_folder(stack: Stack) -> None:
    folder = Path(stack.config.storage.folder)
    await asyncio.to_thread(folder.rename, folder.with_name("lost"))
    await asyncio.to_thread(folder.touch, 0o600)  # a file where a folder should be: nothing below it opens


LOSSES = (
    Loss("storage service gone", _gone, lambda storage: not storage["up"]),
    Loss("storage service silent", _silent, lambda storage: not storage["up"]),
    Loss("L3's folder gone", _no_folder, lambda storage: storage["stats"]["l3_dropped"] > 0),
)


async def measure(config: Config, say: Callable[[str], None]) -> list[Row]:
    """Rows for each loss. Raises StackError when a stack doesn't start, or a loss isn't noticed."""
    config = await asyncio.to_thread(with_model, config, say)
    rows: list[Row] = []
    async with _running(config, 0, say) as untiered:
        for loss in LOSSES:
            async with _running(config, HOST_PREFIXES, say) as degraded:
                rows += await _measure(loss, degraded, untiered, say)
                degraded.kill(STORAGE, signal.SIGCONT)  # so that it can end
    return rows


@asynccontextmanager
async def _running(config: Config, host_prefixes: int, say: Callable[[str], None]) -> AsyncIterator[Stack]:
    """A stack of its own whose host pool holds so many prefixes; 0 = it has none."""
    with private_folder("kvtide-bench-degraded-") as folder:
        config, page_size = private(config, folder), config.cache.page_size
        pages = -(-(PREFIX + NEW) // page_size) + 1
        host_bytes = (1 + host_prefixes * pages) * geometry_of(config).page_bytes if host_prefixes else 0
        cache = replace(config.cache, device_tokens=DEVICE_PREFIXES * pages * page_size, host_bytes=host_bytes)
        async with running_stack(replace(config, cache=cache), report=say) as stack:
            await stack.wait_ready(READY_TIMEOUT_S)
            yield stack


async def _measure(loss: Loss, degraded: Stack, untiered: Stack, say: Callable[[str], None]) -> list[Row]:
    choice = random.Random(loss.name)
    prefixes = [_tokens(choice, PREFIX) for _ in range(FIRST_ROUNDS + ROUNDS)]
    async with client(degraded.url) as http, client(untiered.url) as other:
        both = _Both((degraded, http), (untiered, other), choice)
        say(f"{loss.name}: storing {len(prefixes)} prefixes first")
        for prefix in [*prefixes, *(_tokens(choice, PREFIX) for _ in range(HOST_PREFIXES))]:
            await both.degraded(prefix)
            await asyncio.sleep(SETTLE_S)
        if not (stored := await both.degraded(prefixes[0])).storage_tokens:
            raise StackError(f"a prefix should have been in L3 and was not: {_where(stored)}; the logs say more")
        await loss.carry_out(degraded)
        unnoticed = [await both.degraded(prefix) for prefix in prefixes[1:FIRST_ROUNDS]]
        await _noticed(degraded, loss)
        say(f"{loss.name}: noticed; {ROUNDS} rounds")
        computed, held = [], []
        for prefix in prefixes[FIRST_ROUNDS:]:
            computed.append(await both.ask(prefix, cached=0))
            held.append(await both.ask(prefix, cached=PREFIX))
    what = f"{loss.name}, {PREFIX} tokens and {NEW} new"
    return [
        _row(f"{what}: only the lost tiers had them", computed),
        _row(f"{what}: the device has them", held),
        plain(f"{what}: the slowest before the loss was noticed", "ms", [1e3 * max(each.ttft_s for each in unnoticed)]),
    ]


class Times(NamedTuple):
    """Seconds to first token of the same prompt."""

    degraded: float
    untiered: float


class _Both:
    """The two stacks, each with its client."""

    def __init__(
        self,
        degraded: tuple[Stack, httpx.AsyncClient],
        untiered: tuple[Stack, httpx.AsyncClient],
        choice: random.Random,
    ) -> None:
        self._degraded = degraded
        self._untiered = untiered
        self._choice = choice

    async def degraded(self, prefix: Prompt) -> Answer:
        """Ask the one for a prefix with an end that is new."""
        return await _ask(*self._degraded, [*prefix, *_tokens(self._choice, NEW)])

    async def ask(self, prefix: Prompt, cached: int) -> Times:
        """Ask both, in an order that changes. Raises StackError when one hadn't `cached` tokens on its device."""
        prompt = [*prefix, *_tokens(self._choice, NEW)]
        order = [self._degraded, self._untiered]
        self._choice.shuffle(order)
        answers = {stack: await _ask(stack, http, prompt) for stack, http in order}
        for answer in answers.values():
            if (answer.device_tokens, answer.host_tokens, answer.storage_tokens) != (cached, 0, 0):
                raise StackError(f"a stack should have had {cached} tokens on its device: {_where(answer)}")
        return Times(answers[self._degraded[0]].ttft_s, answers[self._untiered[0]].ttft_s)


async def _ask(stack: Stack, http: httpx.AsyncClient, prompt: Prompt) -> Answer:
    return await complete(http, stack.config.model.name, prompt, max_tokens=1, ignore_eos=True)


async def _noticed(stack: Stack, loss: Loss) -> None:
    deadline = time.monotonic() + NOTICE_TIMEOUT_S
    while not all(loss.noticed(peer) for peer in (await stack.status())["peers"] if peer["role"] == "storage"):
        if time.monotonic() > deadline:
            raise StackError(f"{loss.name}: not noticed within {NOTICE_TIMEOUT_S:g} s; the logs say more")
        await asyncio.sleep(POLL_S)


def _row(what: str, pairs: list[Times]) -> Row:
    degraded, untiered = ([1e3 * each for each in column] for column in zip(*pairs, strict=True))
    return times(what, "ms", "no host tier", degraded, untiered, at_most=GOAL)


def _where(answer: Answer) -> str:
    return f"{answer.device_tokens} on the device, {answer.host_tokens} on the host, {answer.storage_tokens} in L3"


def _tokens(choice: random.Random, count: int) -> Prompt:
    return [choice.randint(*TOKENS) for _ in range(count)]
