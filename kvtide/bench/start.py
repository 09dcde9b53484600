"""`kvtide bench start`: from nothing to a first token, and what the idle stack costs."""

import asyncio
import time
from collections.abc import Callable

import psutil

from kvtide.bench.rows import Row, at_most
from kvtide.bench.step import READY_TIMEOUT_S, private
from kvtide.chat_client import client, complete
from kvtide.private_folder import private_folder
from kvtide.stack import Stack, running_stack, with_model
from shared.config import Config

FIRST_TOKEN_S = 6.0
IDLE_PERCENT = 2.0  # of a core
ROUNDS = 5
SETTLE_S = 8.0  # pools are filled and heartbeats slow down
IDLE_S = 10.0  # two idle heartbeats of each service


async def measure(config: Config, say: Callable[[str], None]) -> list[Row]:
    """Rows of start and idleness; the model is cached before. Raises StackError when the stack doesn't start."""
    config = await asyncio.to_thread(with_model, config, say)
    starts, idle = [], []
    for at in range(ROUNDS):
        say(f"start {at + 1} of {ROUNDS}")
        with private_folder("kvtide-bench-start-") as folder:
            begun = time.perf_counter()
            async with running_stack(private(config, folder)) as stack:
                await stack.wait_ready(READY_TIMEOUT_S)
                async with client(stack.url) as http:
                    await complete(http, stack.config.model.name, [1000, 1001], max_tokens=1)
                starts.append(time.perf_counter() - begun)
                if at == 0:
                    idle.append(await _idle_percent(stack))
    return [
        at_most("four processes from nothing to a first token through HTTP, model cached", "s", starts, FIRST_TOKEN_S),
        at_most(f"processor time of the idle stack over {IDLE_S:g} s", "% of a core", idle, IDLE_PERCENT),
    ]


async def _idle_percent(stack: Stack) -> float:
    await asyncio.sleep(SETTLE_S)
    processes = [psutil.Process(pid) for pid in stack.pids.values()]

    def used_s() -> float:
        return sum(times.user + times.system for times in (process.cpu_times() for process in processes))

    before, begun = used_s(), time.perf_counter()
    await asyncio.sleep(IDLE_S)
    return 100 * (used_s() - before) / (time.perf_counter() - begun)
