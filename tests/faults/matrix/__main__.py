"""`make test-faults`: the matrix. In every cell each request is answered, or ended by a retryable error and answered on
the client's retry; every token that reached a client passes the oracle; nothing stays locked, in flight or quarantined,
and the integrity check is clean. Arguments choose cells: those whose name holds one of them.
"""

import asyncio
import json
import shutil
import socket
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from kvtide.child import StackError
from kvtide.default_model import ensure_default_model
from kvtide.oracle_process import Oracle, running_oracle
from kvtide.private_folder import private_folder
from kvtide.run_folder import LOGS_NAME
from kvtide.stack import Stack, running_stack
from shared.config import Config
from tests.faults.matrix import faults
from tests.faults.matrix.cells import (
    ACTIVITIES,
    DISK_CELLS,
    LINK_CELLS,
    LINKS,
    NEW_PROCESS,
    PAGE_LINK,
    SERVICE_CELLS,
    Cell,
)
from tests.faults.matrix.stage import Stage, at_rest, epochs
from tests.faults.proxy import TcpProxy
from tests.integration.harness import READY_TIMEOUT_S, small_config

RECOVERY_S = 60.0  # after which a cell has failed; the promise is 30 s on an idle machine
REQUEST_TIMEOUT_S = 60.0  # the stack's
POLL_S = 0.1


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
            await _rest(stage.stack, ended_s + RECOVERY_S, lambda now: now.get(replaced) != before.get(replaced, 0))
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


async def _rest(stack: Stack, deadline: float, as_wanted: Callable[[dict[str, int]], bool]) -> None:
    """Wait until nothing is left of the fault; `as_wanted` looks at the services' epochs."""
    status: dict[str, Any] = {}
    while not (status and at_rest(status) and as_wanted(epochs(status)) and await stack.healthy()):
        assert time.monotonic() < deadline, f"not recovered after {RECOVERY_S:g} s: {status}"
        try:
            status = await stack.status()
        except StackError:
            continue  # the scheduler is just being started again; this took its 3 s
        await asyncio.sleep(POLL_S)
    assert status["integrity"] == "ok", status["integrity"]


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
        await faults.hit_service(self.stage, f"{cell.part}-0", cell.fault)
        return started_s if cell.fault in NEW_PROCESS else time.monotonic()


class LinkRig(Rig):
    """A stack whose every link runs through a proxy; the worker gets its host pages over the network."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._scheduler, self._pages = (f"tcp://127.0.0.1:{_free_port()}" for _ in range(2))
        self._proxies = {link: TcpProxy(self._pages if link == PAGE_LINK else self._scheduler) for link in LINKS}

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Rig"]:
        """Start the proxies, then the stack."""
        async with AsyncExitStack() as entered:
            for proxy in self._proxies.values():
                await entered.enter_async_context(proxy)
            config = self.config()
            config = replace(
                config,
                run=replace(config.run, scheduler_endpoint=self._scheduler),
                worker=replace(config.worker, host_path="remote"),
                storage=replace(
                    config.storage,
                    pages_endpoint=self._pages,
                    pages_advertise=self._proxies[PAGE_LINK].endpoint,
                ),
            )
            await entered.enter_async_context(self._stack(config, self._of_role))
            yield self

    def _of_role(self, role: str, config: Config) -> Config:
        proxy = self._proxies.get(f"{role}-scheduler")
        return replace(config, run=replace(config.run, scheduler_endpoint=proxy.endpoint)) if proxy else config

    async def hit(self, cell: Cell) -> float:
        """Requests that compute, write back and load back; then the fault."""
        text = await self.stage.on_host()
        for each in (text, self.stage.fresh(), self.stage.fresh()):
            self.stage.ask(each)
        await faults.hit_link(self._proxies[cell.part], cell.part, cell.fault)
        return time.monotonic()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


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
