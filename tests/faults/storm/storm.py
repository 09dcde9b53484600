"""One storm: a stack, its traffic, its faults, and what is looked at when they are over."""

import asyncio
import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from kvtide.bench.memory import growth, proportional_set_size
from kvtide.oracle_process import Oracle
from kvtide.private_folder import private_folder
from kvtide.run_folder import LOGS_NAME
from kvtide.stack import Stack, running_stack
from shared.config import Config
from tests.faults.matrix.processes import Processes
from tests.faults.matrix.stage import RECOVERY_S, rest
from tests.faults.proxied import proxied
from tests.faults.storm.crowd import Crowd
from tests.faults.storm.weather import Weather
from tests.integration.harness import READY_TIMEOUT_S, small_config

REQUEST_TIMEOUT_S = 60.0  # the stack's
QUOTA_BYTES = 192 * 2**20  # of L3: about a third of the families, so that it evicts, too
SLACK_BYTES = 64 * 2**20  # of L3 above its quota: its quarantine, and pages that are being written
SAMPLE_S = 1.0
MEMORY = Path("/dev/shm")
GROWTH = 0.1  # of memory between the halves of a long storm
MORE = 1.01  # host pools' bytes after the storm by those before: lock files have none
LONG_S = 600.0  # in a shorter one the few restarts decide what the halves have


@dataclass
class Result:
    """The line of JSON."""

    seconds: float
    seed: int
    faults: int = 0
    answered: int = 0
    retried: int = 0  # of them, after an error that told to try again
    aborted: int = 0  # by the client
    hung: int = 0
    tokens: int = 0  # checked
    wrong: int = 0
    recovered_s: float = 0.0  # from the end of the last answer until nothing is left of the faults
    memory_growth: float = 0.0  # of the services' summed PSS, second half by first
    most_memory: int = 0  # bytes
    most_disk: int = 0  # bytes of L3
    segment_bytes: int = 0  # of host pools at the end, in memory
    failures: list[str] = field(default_factory=list)


async def storm(oracle: Oracle, seconds: float, seed: int, remote: bool, say: Callable[[str], None]) -> Result:
    """Storm for so long. A failed one keeps its logs, and says where."""
    result = Result(seconds, seed)
    with private_folder("kvtide-storm-") as folder, private_folder("kvtide-storm-", MEMORY) as memory:
        hooks = folder / "hooks"
        hooks.mkdir()
        async with proxied(_config(folder, memory), remote) as (config, of_role, proxies):
            async with running_stack(config, {"KVTIDE_TEST_HOOKS": str(hooks)}, of_role=of_role) as stack:
                await stack.wait_ready(READY_TIMEOUT_S)
                target = Processes(stack, hooks, proxies)
                crowd = Crowd(target, oracle, seed)
                weather = Weather(target, proxies, config.storage_folder, seed, say)
                watch = Watch(stack)
                try:
                    await _until_calm(stack, [crowd.run(seconds), weather.run(seconds)], watch)
                    begun_s = time.monotonic()
                    await rest(target, begun_s + RECOVERY_S)
                    result.recovered_s = round(time.monotonic() - begun_s, 1)
                except Exception as error:
                    result.failures += [f"{type(each).__name__}: {each}" for each in _leaves(error)]
                watch.look()
        _sum_up(result, crowd, weather, watch)
        if result.failures:
            kept = Path(tempfile.mkdtemp(prefix="kvtide-kept-logs-"))
            shutil.copytree(config.run_folder / LOGS_NAME, kept, dirs_exist_ok=True)
            say(f"its logs: {kept}")
    return result


async def _until_calm(stack: Stack, parts: list[Coroutine[None, None, None]], watch: "Watch") -> None:
    async with asyncio.TaskGroup() as group:
        beside = [group.create_task(each) for each in (stack.watch(), watch.run())]
        await asyncio.wait([group.create_task(part) for part in parts])
        for task in beside:
            task.cancel()


def _leaves(error: Exception) -> list[Exception]:
    if isinstance(error, ExceptionGroup):
        return [leaf for each in error.exceptions for leaf in _leaves(each)]
    return [error]


def _config(folder: Path, memory: Path) -> Config:
    config = small_config(folder, prefetch_policy="timeout")
    return replace(
        config,
        scheduler=replace(config.scheduler, request_timeout_s=REQUEST_TIMEOUT_S),
        storage=replace(config.storage, segment_folder=str(memory), quota_bytes=QUOTA_BYTES),
    )


class Watch:
    """Memory of the services, and bytes of L3 and of the host pools, over time."""

    def __init__(self, stack: Stack) -> None:
        self.memory: list[tuple[float, int]] = []  # seconds since the beginning, bytes
        self.disk: list[int] = []
        self.segments: list[int] = []
        self._stack = stack
        self._begun_s = time.monotonic()

    async def run(self) -> None:
        """Look again and again."""
        while True:
            await asyncio.to_thread(self.look)
            await asyncio.sleep(SAMPLE_S)

    def look(self) -> None:
        """Once. Blocks."""
        storage = self._stack.config.storage
        pids = self._stack.pids
        self.memory.append((time.monotonic() - self._begun_s, proportional_set_size(pids.values())))
        self.disk.append(_bytes(Path(storage.folder)))
        self.segments.append(_bytes(Path(storage.segment_folder)))


def _bytes(folder: Path) -> int:
    found = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # it has just gone
            found += path.stat().st_size if path.is_file() else 0
    return found


def _sum_up(result: Result, crowd: Crowd, weather: Weather, watch: Watch) -> None:
    result.faults, result.answered, result.retried = len(weather.faults), crowd.answered, crowd.retried
    result.aborted, result.hung, result.tokens, result.wrong = crowd.aborted, crowd.hung, crowd.checked, crowd.wrong
    result.memory_growth = round(growth(watch.memory), 3)
    result.most_memory, result.most_disk = max(size for _, size in watch.memory), max(watch.disk)
    result.segment_bytes, first = watch.segments[-1], watch.segments[0]
    wrong = {
        f"{result.wrong} of {result.tokens} tokens are wrong": result.wrong,
        "no token was checked": not result.tokens,
        f"{len(crowd.refused)} requests were not answered: {crowd.refused[:3]}": crowd.refused,
        f"L3 had {result.most_disk:,} bytes": result.most_disk > QUOTA_BYTES + SLACK_BYTES,
        f"host pools have {result.segment_bytes:,} bytes, at first {first:,}": result.segment_bytes > first * MORE,
        f"memory grew by {result.memory_growth:.1%}": result.memory_growth > GROWTH and result.seconds >= LONG_S,
    }
    result.failures += [what for what, is_so in wrong.items() if is_so]
