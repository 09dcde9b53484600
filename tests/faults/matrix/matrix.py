"""Runs cells, and what became of them."""

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from kvtide.oracle_process import Oracle
from tests.faults.matrix import faults
from tests.faults.matrix.cells import ACTIVITIES, DISK_CELLS, NEW_PROCESS, SERVICE_CELLS, Cell
from tests.faults.matrix.stage import RECOVERY_S, Stage, epochs, rest
from tests.faults.matrix.target import Target

MakeTarget = Callable[[], AbstractAsyncContextManager[Target]]


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

    async def run(self, cells: list[Cell], make: MakeTarget) -> None:
        """Run cells on one stack; after a failure the next one gets a new stack."""
        left = list(cells)
        while left:
            async with make() as target:
                stage = Stage(target)
                if any(cell in SERVICE_CELLS + DISK_CELLS for cell in left):
                    await stage.store()
                await self._run_until_failure(left, stage)

    async def _run_until_failure(self, left: list[Cell], stage: Stage) -> None:
        while left:
            result = await self._cell(left.pop(0), stage)
            self.results.append(result)
            print(f"{len(self.results):3}  {result}", flush=True)
            if result.failure:
                kept = Path(tempfile.mkdtemp(prefix="kvtide-kept-logs-"))
                await stage.target.keep_logs(kept)
                print(f"     its logs: {kept}", flush=True)
                return

    async def _cell(self, cell: Cell, stage: Stage) -> Result:
        result, target = Result(cell), stage.target
        try:
            before = epochs(await target.status())
            ended_s = await faults.hit(stage, cell)
            asked = await stage.end()
            replaced = target.identity(cell.part) if cell.fault in NEW_PROCESS else ""
            await rest(target, ended_s + RECOVERY_S, lambda now: now.get(replaced) != before.get(replaced, 0))
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

    def figures(self, wanted: int, wall_s: float) -> dict[str, str | int | float]:
        """Of all cells. wanted: how many were to be run."""
        return {
            "test": "faults",
            "cells": len(self.results),
            "failed": sum(bool(result.failure) for result in self.results),
            "skipped": wanted - len(self.results),
            "requests": sum(result.requests for result in self.results),
            "retried": sum(result.retried for result in self.results),
            "tokens": sum(result.tokens for result in self.results),
            "slowest_recovery_s": round(max((result.recovered_s for result in self.results), default=0.0), 1),
            "wall_s": round(wall_s, 1),
        }


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
