"""`kvtide bench step`: what a decode step costs beside the model: its time through HTTP less the worker's compute."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from kvtide.bench.rows import Row, at_most, plain
from kvtide.chat_client import client, complete
from kvtide.child import StackError
from kvtide.private_folder import private_folder
from kvtide.stack import Stack, running_stack, with_model
from shared.config import Config

LIMITS_MS = {1: 3.0, 16: 5.0}  # requests in a step: goal
STEPS = 200
ROUNDS = 5
READY_TIMEOUT_S = 120.0  # a start takes about 5 s; a machine that is busy with something else may take 60
COUNTED_TIMEOUT_S = 15.0  # the worker's totals come with its heartbeat, every 5 s when idle
POLL_S = 0.2
FIRST_TOKEN = 1000  # an ordinary token of any model with a large vocabulary


class Totals(NamedTuple):
    """Of the worker since its start."""

    steps: float
    seconds: float  # of compute
    tokens: float  # decoded


async def measure(config: Config, say: Callable[[str], None]) -> list[Row]:
    """Rows for one request and for sixteen. Raises StackError when the stack doesn't start."""
    config = await asyncio.to_thread(with_model, config, say)
    rows: list[Row] = []
    with private_folder("kvtide-bench-step-") as folder:
        async with running_stack(private(config, folder), report=say) as stack:
            await stack.wait_ready(READY_TIMEOUT_S)
            for batch, limit in LIMITS_MS.items():
                say(f"{batch} requests of {STEPS} tokens, {ROUNDS} rounds")
                rounds = [await _round(stack, batch) for _ in range(ROUNDS + 1)][1:]  # the first warms up
                what = f"{STEPS} decode steps through HTTP, batch {batch}"
                rows.append(at_most(f"control: {what}", "ms a step", [each[0] for each in rounds], limit))
                rows.append(plain(f"compute: {what}", "ms a step", [each[1] for each in rounds]))
    return rows


def private(config: Config, folder: Path) -> Config:
    """A stack of its own in `folder`, at any free port."""
    return replace(
        config,
        storage=replace(config.storage, folder=str(folder / "l3")),
        gateway=replace(config.gateway, host="127.0.0.1", port=0, api_keys=()),
        run=replace(config.run, name=folder.name.lower(), folder=str(folder / "run"), scheduler_endpoint=""),
    )


async def _round(stack: Stack, batch: int) -> tuple[float, float]:
    """Milliseconds a step: control and compute. The prompts are short, so that prefill is a step like the others."""
    before = await _totals(stack, 0)
    begun = time.perf_counter()
    async with client(stack.url) as http, asyncio.TaskGroup() as group:
        for row in range(batch):
            prompt = [FIRST_TOKEN + row, FIRST_TOKEN]
            group.create_task(complete(http, stack.config.model.name, prompt, max_tokens=STEPS, ignore_eos=True))
    wall_s = time.perf_counter() - begun
    after = await _totals(stack, before.tokens + batch * (STEPS - 1))
    steps, compute_s = after.steps - before.steps, after.seconds - before.seconds
    return 1e3 * (wall_s - compute_s) / steps, 1e3 * compute_s / steps


async def _totals(stack: Stack, tokens: float) -> Totals:
    """The worker's totals once they count so many decoded tokens."""
    deadline = time.monotonic() + COUNTED_TIMEOUT_S
    while True:
        stats = [peer["stats"] for peer in (await stack.status())["peers"] if peer["role"] == "worker"]
        if stats and stats[0].get("decode_tokens", 0) >= tokens:
            return Totals(*(stats[0].get(name, 0.0) for name in ("steps", "step_seconds", "decode_tokens")))
        if time.monotonic() > deadline:
            raise StackError(f"the worker has not counted {tokens:.0f} decoded tokens within {COUNTED_TIMEOUT_S:g} s")
        await asyncio.sleep(POLL_S)
