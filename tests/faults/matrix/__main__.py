"""`make test-faults`: the matrix. In every cell each request is answered, or ended by a retryable error and answered on
the client's retry; every token that reached a client passes the oracle; nothing stays locked, in flight or quarantined,
and the integrity check is clean. Arguments choose cells: those whose name holds one of them.
"""

import asyncio
import json
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from kvtide.default_model import ensure_default_model
from kvtide.oracle_process import Oracle, running_oracle
from kvtide.private_folder import private_folder
from kvtide.run_folder import LOGS_NAME
from kvtide.stack import running_stack
from shared.config import Config
from tests.faults.matrix import faults
from tests.faults.matrix.cells import (
    ACTIVITIES,
    DISK_CELLS,
    LINK_CELLS,
    NEW_PROCESS,
    SERVICE_CELLS,
    Cell,
)
from tests.faults.matrix.stage import RECOVERY_S, Stage, epochs, rest
from tests.faults.proxied import proxied
from tests.integration.harness import READY_TIMEOUT_S, small_config

REQUEST_TIMEOUT_S = 60.0  # the stack's


class Result:
    """What became of a cell."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.failure = ""  # why it isn't as it should be
        self.requests = self.retried = self.tokens = 0
        self.recovered_s = 0.0  # from the fault's end until everything was answered and the stack at rest

    @property
    def seconds(self) -> str:
        """For the table."""
        return "FAILED" if self.failure else f"{self.recovered_s:.1f}"

    def __str__(self) -> str:
        what = f"{self.cell.part:21} {self.cell.fault:11} {self.cell.activity:13}"
        if self.failure:
            return f"{what} FAILED {self.failure}"
        return (
            f"{what} answered {self.requests}, {self.retried} of them on a retry; {self.tokens} tokens right; "
            f"recovered after {self.recovered_s:.1f} s"
        )


class Matrix:
    """Runs cells and keeps what became of them."""

    def __init__(self, oracle: Oracle) -> None:
        self.results: list[Result] = []
        self._oracle = oracle

    async def run(self, cells: list[Cell], make: Callable[[Path], "Rig"]) -> None:
        """Run cells on one stack; after a failure the next one gets a new stack."""
        left = list(cells)
        while left:
            with private_folder("kvtide-faults-") as folder:
                async with make(folder).running() as rig:
                    await self._run_until_failure(left, rig)

    async def _run_until_failure(self, left: list[Cell], rig: "Rig") -> None:
        while left:
            result = await self._cell(left.pop(0), rig)
            self.results.append(result)
            print(f"{len(self.results):3}  {result}", flush=True)
            if result.failure:
                kept = Path(tempfile.mkdtemp(prefix="kvtide-kept-logs-"))
                shutil.copytree(rig.stage.stack.config.run_folder / LOGS_NAME, kept, dirs_exist_ok=True)
                print(f"     its logs: {kept}", flush=True)
                return

    async def _cell(self, cell: Cell, rig: "Rig") -> Result:
        result, stage = Result(cell), rig.stage
        try:
            before = epochs(await stage.stack.status())
            ended_s = await rig.hit(cell)
            asked = await stage.end()
            replaced = f"{cell.part}-0" if cell.fault in NEW_PROCESS else ""
            await rest(stage.stack, ended_s + RECOVERY_S, lambda now: now.get(replaced) != before.get(replaced, 0))
            result.recovered_s = time.monotonic() - ended_s
            result.requests, result.retried = len(asked), sum(bool(each.errors) for each in asked)
            if cell.part in ("storage", "disk"):  # a lost tier costs time, never an answer
                assert not result.retried, f"a request had to be repeated: {[each.errors for each in asked]}"
            emitted = [each for one in asked for each in one.emitted]
            verdict = await self._oracle.check(emitted)
            result.tokens = verdict.checked
            assert verdict.wrong == 0, f"{verdict.wrong} of {verdict.checked} tokens are wrong"
            assert verdict.checked > 0, "no token was checked"
        except Exception as error:
            result.failure = f"{type(error).__name__}: {error}"
        return result


class Rig:
    """A stack for service and disk cells: the worker maps the host pool."""

    stage: Stage

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._hooks = folder / "hooks"
        self._hooks.mkdir()

    def config(self) -> Config:
        """Of the stack."""
        config = small_config(self._folder)
        return replace(config, scheduler=replace(config.scheduler, request_timeout_s=REQUEST_TIMEOUT_S))

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Rig"]:
        """Start it."""
        async with self._stack(self.config(), lambda role, config: config):
            await self.stage.store()
            yield self

    @asynccontextmanager
    async def _stack(self, config: Config, of_role: Callable[[str, Config], Config]) -> AsyncIterator[None]:
        environment = {"KVTIDE_TEST_HOOKS": str(self._hooks)}
        async with running_stack(config, environment, of_role=of_role) as stack:
            await stack.wait_ready(READY_TIMEOUT_S)
            self.stage = Stage(stack, self._hooks)
            yield

    async def hit(self, cell: Cell) -> float:
        """Bring the requests where the cell wants them, and carry out its fault. Returns when it was over."""
        if cell.part == "disk":
            await faults.hit_disk(self.stage, cell.fault)
            return time.monotonic()
        await self.stage.begin(cell.activity)
        started_s = time.monotonic()
        await faults.hit_service(self.stage.stack, f"{cell.part}-0", cell.fault, faults.PAUSE_S)
        return started_s if cell.fault in NEW_PROCESS else time.monotonic()


class LinkRig(Rig):
    """A stack whose every link runs through a proxy; the worker gets its host pages over the network."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Rig"]:
        """Start the proxies, then the stack."""
        async with proxied(self.config(), remote=True) as (config, of_role, self._proxies):
            async with self._stack(config, of_role):
                yield self

    async def hit(self, cell: Cell) -> float:
        """Requests that compute, write back and load back; then the fault."""
        text = await self.stage.on_host()
        for each in (text, self.stage.fresh(), self.stage.fresh()):
            self.stage.ask(each)
        proxy = self._proxies[cell.part]
        before = proxy.chunks
        await faults.disturb(proxy, cell.part, cell.fault, faults.LINK_FAULT_S)
        assert proxy.chunks > before, f"nothing went over {cell.part} while it was disturbed"
        return time.monotonic()


def table(results: list[Result]) -> str:
    """The matrix: seconds until everything was well again."""
    services = [result for result in results if result.cell.activity in ACTIVITIES]
    others = [result for result in results if result.cell.activity not in ACTIVITIES]
    rows: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for result in services:
        rows[f"{result.cell.part} {result.cell.fault}"][result.cell.activity] = result.seconds
    lines = [" " * 22 + "".join(f"{activity:>14}" for activity in ACTIVITIES)] if services else []
    for name, row in sorted(rows.items()):
        lines.append(f"{name:22}" + "".join(f"{row.get(activity, '-'):>14}" for activity in ACTIVITIES))
    lines += [f"{result.cell.part + ' ' + result.cell.fault:32}{result.seconds:>8}" for result in others]
    return "\n".join(lines)


async def main(names: list[str]) -> int:
    """The number of cells that failed."""
    chosen = partial(filter, lambda cell: not names or any(name in str(cell) for name in names))
    parts = [(list(chosen(SERVICE_CELLS + DISK_CELLS)), Rig), (list(chosen(LINK_CELLS)), LinkRig)]
    wanted, started_s = sum(len(cells) for cells, _ in parts), time.monotonic()
    async with running_oracle(ensure_default_model()) as oracle:
        matrix = Matrix(oracle)
        for cells, rig in parts:
            await matrix.run(cells, rig)
    failed, wall_s = sum(bool(result.failure) for result in matrix.results), time.monotonic() - started_s
    print(f"\nseconds until everything was answered and the stack at rest\n{table(matrix.results)}\n")
    figures = {
        "test": "faults", "cells": len(matrix.results), "failed": failed, "skipped": wanted - len(matrix.results),
        "requests": sum(r.requests for r in matrix.results), "retried": sum(r.retried for r in matrix.results),
        "tokens": sum(r.tokens for r in matrix.results),
        "slowest_recovery_s": round(max((r.recovered_s for r in matrix.results), default=0.0), 1),
        "wall_s": round(wall_s, 1),
    }  # fmt: skip
    print(json.dumps(figures))
    return min(failed, 100)


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1:])))
