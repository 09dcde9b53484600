"""`kvtide bench decode`: tokens a second of running requests through HTTP, against what reading the weights allows.

A decode step of one request reads every weight once, so that memory bandwidth over weight bytes bounds its rate.
"""

import asyncio
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from kvtide.bench.rows import Row, compared
from kvtide.bench.step import FIRST_TOKEN, READY_TIMEOUT_S, private
from kvtide.chat_client import client, complete
from kvtide.private_folder import private_folder
from kvtide.stack import Stack, running_stack, with_model
from services.gpu_worker.model.weights import weight_files
from shared.config import Config

STEPS = 200
ROUNDS = 5
BATCH = 16
BANDWIDTH_GOAL = 0.5  # of reading the weights
BATCH_GOAL = 5.0  # times the tokens of one request
ITEM_BYTES = 2  # bfloat16


async def measure(config: Config, say: Callable[[str], None]) -> list[Row]:
    """Rows of one request and of sixteen. Raises StackError when the stack doesn't start."""
    config = await asyncio.to_thread(with_model, config, say)
    config = replace(config, model=replace(config.model, dtype="bfloat16"))
    threads = config.worker.threads or len(os.sched_getaffinity(0))
    weight_bytes = ITEM_BYTES * await asyncio.to_thread(_parameters, Path(config.model.path))
    weights = await asyncio.to_thread(np.ones, weight_bytes // 8, np.int64)
    alone, limits, together = [], [], []
    with private_folder("kvtide-bench-decode-") as folder:
        async with running_stack(private(config, folder), report=say) as stack:
            await stack.wait_ready(READY_TIMEOUT_S)
            for at in range(1 + ROUNDS):  # the first warms up
                say(f"round {at} of {ROUNDS}")
                limits.append(await asyncio.to_thread(_reads_a_second, weights, threads))
                alone.append(await _rate(stack, 1))
                together.append(await _rate(stack, BATCH))
    what = f"{STEPS} tokens each through HTTP, bfloat16, {threads} threads"
    limit = f"memory read bandwidth, {threads} threads, over {weight_bytes / 1e6:,.0f} MB of weights"
    return [
        compared(f"decode, batch 1, {what}", "tokens/s", limit, alone[1:], limits[1:], BANDWIDTH_GOAL),
        compared(f"decode, batch {BATCH}, {what}", "tokens/s", "batch 1", together[1:], alone[1:], BATCH_GOAL),
    ]


def _parameters(folder: Path) -> int:
    """Elements of all tensors, by the files' headers."""
    count = 0
    for path in weight_files(folder):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        count += sum(int(np.prod(each["shape"])) for name, each in header.items() if name != "__metadata__")
    return count


def _reads_a_second(weights: np.ndarray, threads: int) -> float:
    """How often all of it can be read in a second; the best of three."""
    shares = np.array_split(weights, threads)
    with ThreadPoolExecutor(threads) as executor:

        def once() -> float:
            begun = time.perf_counter()
            list(executor.map(np.bitwise_or.reduce, shares))
            return time.perf_counter() - begun

        return 1 / min(once() for _ in range(3))


async def _rate(stack: Stack, batch: int) -> float:
    """Tokens a second of so many requests, from sending them to their ends."""
    begun = time.perf_counter()
    async with client(stack.url) as http, asyncio.TaskGroup() as group:
        for row in range(batch):
            prompt = [FIRST_TOKEN + row, FIRST_TOKEN]
            group.create_task(complete(http, stack.config.model.name, prompt, max_tokens=STEPS, ignore_eos=True))
    return batch * STEPS / (time.perf_counter() - begun)
