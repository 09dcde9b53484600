"""`kvtide bench soak`: mixed load with aborts on pools far too small; looks for errors, hangs, leaks and growth."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from kvtide.bench.load import Load
from kvtide.bench.memory import growth, sample
from kvtide.chat_client import client
from kvtide.private_folder import private_folder
from kvtide.progress import console, reporter
from kvtide.stack import Stack, running_stack, unfinished, with_model
from kvtide.tiers import geometry_of
from shared.config import Config

POOL_SHARE = 10  # of the live tokens a pool holds one part in so many: nearly every request needs an eviction
PAGE_TOKENS = 16  # many pages in a small pool
QUOTA_BYTES = 128 * 2**20  # about 2,900 tokens of L3, so that its quota evicts too
PREFETCH_THRESHOLD = 32  # tokens; short prompts are to take part
READY_TIMEOUT_S = 120.0  # a start takes about 5 s; a machine that is busy with something else may take 60
IDLE_TIMEOUT_S = 30.0  # after the load: aborts are taken within a step, the last files within seconds
SHOWN_ERRORS = 5


class Result(msgspec.Struct, frozen=True):
    """The line of JSON."""

    bench: str
    requests: int
    errors: int  # requests refused or broken, and services that ended
    hung: int  # requests without an end
    leaked: int  # open requests, locks and pages in flight or quarantined once idle
    growth: float  # of the services' summed PSS after the warm-up, relative


async def run_soak(config: Config, seconds: float, seed: int, as_json: bool) -> int:
    """Run the soak; returns the exit status: 0 when nothing failed, hung or leaked."""
    screen = console(stderr=as_json)
    load = Load(seed)
    with private_folder("kvtide-soak-") as folder, reporter(screen) as progress:
        config = soak_config(await asyncio.to_thread(with_model, config, progress.say), folder, load.live_tokens)
        pool = config.cache.device_tokens
        progress.say(f"{load.live_tokens:,} live tokens, {pool:,} in the device pool and as many in the host pool")
        async with running_stack(config, report=progress.say) as stack:
            await stack.wait_ready(READY_TIMEOUT_S)
            started = time.monotonic()
            progress.step("soak, seconds", round(seconds))
            result, status = await _soak(
                stack, load, seconds, lambda: progress.advance(min(round(seconds), round(time.monotonic() - started)))
            )
    for error in load.errors[:SHOWN_ERRORS]:
        screen.print(f"error: {error}", highlight=False, markup=False, soft_wrap=True)
    screen.print(
        f"{result.requests} requests ({load.aborted} aborted), {result.errors} errors, {result.hung} hung, "
        f"{result.leaked} leaked, memory {result.growth:+.1%}, integrity {status['integrity']}",
        highlight=False,
    )
    if as_json:
        print(msgspec.json.encode(result).decode(), flush=True)
    return 1 if result.errors or result.hung or result.leaked or status["integrity"] != "ok" else 0


def soak_config(base: Config, folder: Path, live_tokens: int) -> Config:
    """A private stack in `folder` whose device and host pools hold a tenth of the live tokens each."""
    tokens = live_tokens // POOL_SHARE // PAGE_TOKENS * PAGE_TOKENS
    config = replace(
        base,
        model=replace(base.model, dtype="float32"),
        cache=replace(base.cache, page_size=PAGE_TOKENS, device_tokens=tokens, prefetch_threshold=PREFETCH_THRESHOLD),
        storage=replace(base.storage, folder=str(folder / "l3"), quota_bytes=QUOTA_BYTES),
        gateway=replace(base.gateway, host="127.0.0.1", port=0, api_keys=()),
        run=replace(base.run, name=folder.name.lower(), folder=str(folder / "run"), scheduler_endpoint=""),
    )
    return replace(config, cache=replace(config.cache, host_bytes=tokens * geometry_of(config).token_bytes))


async def _soak(
    stack: Stack, load: Load, seconds: float, progress: Callable[[], None]
) -> tuple[Result, dict[str, Any]]:
    pids = stack.pids
    samples: list[tuple[float, int]] = []
    sampler = asyncio.create_task(sample(lambda: stack.pids.values(), samples))
    try:
        async with client(stack.url) as http:
            await load.run(http, stack.config.model.name, seconds, progress)
    finally:
        sampler.cancel()
    status = await stack.wait_idle(IDLE_TIMEOUT_S)
    ended = [identity for identity, pid in pids.items() if stack.pids.get(identity) != pid]
    load.errors += [f"{identity} ended" for identity in ended]
    result = Result(
        bench="soak",
        requests=load.requests,
        errors=len(load.errors),
        hung=load.hung,
        leaked=unfinished(status),
        growth=round(growth(samples), 4),
    )
    return result, status
