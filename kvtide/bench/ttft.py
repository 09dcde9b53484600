"""`kvtide bench ttft`: time to first token of a prompt whose prefix lies on the device, on the host, in warm files, or
nowhere, through HTTP; on an idle stack and beside running decodes.

Each round asks for a prefix of its own: first nowhere, then on the device; other prompts push it out of the device,
then out of the host pool. Where the prefix was is what the answer's usage says: a round in which it was elsewhere is
measured again.
"""

import asyncio
import contextlib
import random
import statistics
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

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

PREFIX, NEW = 2048, 64  # tokens
DEVICE_TOKENS = 2 * (PREFIX + 2 * NEW)  # one prefix and one other prompt
HOST_PREFIXES = 5  # that the host pool holds: a prefetch may take a quarter of it
DECODES = 8
DECODE_TOKENS = 384  # of one answer; then the next begins
ROUNDS = 5
TRIES = 3 * ROUNDS  # rounds, those included in which the prefix was elsewhere
SETTLE_S = 0.5  # backup and archive of a prompt take 0.1 s
COUNTED_S = 6.0  # the worker's totals come with its heartbeat, every 5 s when idle
TOKENS = (1000, 40000)  # ordinary tokens of any model with a large vocabulary
HOST_GOAL, STORAGE_GOAL, RECOMPUTE_GOAL = 1.15, 1.4, 3.0  # times a device hit


@dataclass
class Times:
    """Seconds to first token of each round."""

    recompute: list[float] = field(default_factory=list)
    device: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    storage: list[float] = field(default_factory=list)


class Loads(NamedTuple):
    """The worker's copies from host to device since its start."""

    seconds: float
    bytes: float


async def measure(config: Config, say: Callable[[str], None]) -> list[Row]:
    """Rows for the idle and the decoding stack. Raises StackError when the stack doesn't start."""
    config = await asyncio.to_thread(with_model, config, say)
    config = replace(config, model=replace(config.model, dtype="bfloat16"))
    rows: list[Row] = []
    for decodes in (0, DECODES):
        with private_folder("kvtide-bench-ttft-") as folder:
            async with running_stack(_sized(private(config, folder), decodes), report=say) as stack:
                await stack.wait_ready(READY_TIMEOUT_S)
                rows += await _measure(stack, decodes, say)
    return rows


def _sized(config: Config, decodes: int) -> Config:
    cache, page_bytes = config.cache, geometry_of(config).page_bytes
    prefix_pages = -(-(PREFIX + NEW) // cache.page_size)
    device_tokens = DEVICE_TOKENS + decodes * (DECODE_TOKENS + cache.page_size)
    host_bytes = (1 + HOST_PREFIXES * prefix_pages) * page_bytes
    storage = replace(config.storage, direct_writes=False)  # files stay in the kernel's cache
    return replace(config, cache=replace(cache, device_tokens=device_tokens, host_bytes=host_bytes), storage=storage)


async def _measure(stack: Stack, decodes: int, say: Callable[[str], None]) -> list[Row]:
    geometry, found = geometry_of(stack.config), Times()
    before = await _loads(stack)
    async with client(stack.url) as http, _decoding(http, stack.config.model.name, decodes):
        for at in range(TRIES):
            say(f"{decodes} running decodes, round {len(found.host) + 1} of {ROUNDS}")
            await _round(http, stack.config, random.Random(at), found)
            if len(found.host) == ROUNDS:
                break
        else:
            raise StackError(f"in {TRIES} rounds the prefix was {len(found.host)} times where it should have been")
    await asyncio.sleep(COUNTED_S)
    after = await _loads(stack)
    where = f"{PREFIX} tokens cached and {NEW} new, bfloat16, beside {decodes} decodes"
    device, peer = _milli(found.device), "device hit"
    load_s, load_bytes = after.seconds - before.seconds, after.bytes - before.bytes
    extra_s = statistics.median(storage - hit for storage, hit in zip(found.storage, found.device, strict=True))
    load, file = f"load, host to device, beside {decodes} decodes", f"file to device, beside {decodes} decodes"
    rows = [
        times(f"host hit, {where}", "ms", peer, _milli(found.host), device, at_most=HOST_GOAL),
        times(f"storage hit (warm files), {where}", "ms", peer, _milli(found.storage), device, at_most=STORAGE_GOAL),
        times(f"recompute, {where}", "ms", peer, _milli(found.recompute), device, at_least=RECOMPUTE_GOAL),
        plain(load, "GB/s", [load_bytes / load_s / 1e9]),
        plain(load, "ns a token", [1e9 * load_s / (load_bytes / geometry.token_bytes)]),
    ]
    if extra_s > 0:  # storage hit less device hit: on a busy machine it may drown in the noise
        rows.append(plain(file, "GB/s", [PREFIX * geometry.token_bytes / extra_s / 1e9]))
        rows.append(plain(file, "ns a token", [1e9 * extra_s / PREFIX]))
    return rows


async def _round(http: httpx.AsyncClient, config: Config, choice: random.Random, found: Times) -> None:
    """Add one time of each kind, or none when the prefix wasn't where it should be."""
    cache = config.cache

    def tokens(count: int) -> list[int]:
        return [choice.randint(*TOKENS) for _ in range(count)]

    async def ask(start: list[int]) -> Answer:
        done = await complete(http, config.model.name, [*start, *tokens(NEW)], max_tokens=1, ignore_eos=True)
        await asyncio.sleep(SETTLE_S)
        return done

    async def push_out(pool_tokens: float) -> None:
        for _ in range(-(-int(pool_tokens) // (PREFIX + NEW))):
            await ask(tokens(PREFIX))

    prefix = tokens(PREFIX)
    recompute = await ask(prefix)
    device = await ask(prefix)
    await push_out(cache.device_tokens)
    host = await ask(prefix)
    await push_out(cache.host_bytes / geometry_of(config).token_bytes)
    storage = await ask(prefix)
    if (device.device_tokens, host.host_tokens, storage.storage_tokens) == (PREFIX, PREFIX, PREFIX):
        for name, answer in zip(
            ("recompute", "device", "host", "storage"), (recompute, device, host, storage), strict=True
        ):
            getattr(found, name).append(answer.ttft_s)


@asynccontextmanager
async def _decoding(http: httpx.AsyncClient, model: str, count: int) -> AsyncIterator[None]:
    """So many requests that decode, each followed by another."""

    async def decode(row: int) -> None:
        while True:
            await complete(http, model, [TOKENS[0] + row, TOKENS[0]], max_tokens=DECODE_TOKENS, ignore_eos=True)

    running = [asyncio.create_task(decode(row)) for row in range(count)]
    try:
        yield
    finally:
        for task in running:
            task.cancel()
        for task in running:
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def _loads(stack: Stack) -> Loads:
    for peer in (await stack.status())["peers"]:
        if peer["role"] == "worker":
            return Loads(peer["stats"].get("load_seconds", 0.0), peer["stats"].get("load_bytes", 0.0))
    raise StackError("the stack has no worker; its log says why")


def _milli(seconds: list[float]) -> list[float]:
    return [1e3 * each for each in seconds]
