"""`make test-faults`: the matrix. In every cell each request is answered, or ended by a retryable error and answered on
the client's retry; every token that reached a client passes the oracle; nothing stays locked, in flight or quarantined,
and the integrity check is clean. Arguments choose cells: those whose name holds one of them. `--containers`
(`make test-compose-faults`) has the stack in containers.
"""

import argparse
import asyncio
import contextlib
import json
import signal
import sys
import time
from functools import partial

from kvtide.default_model import ensure_default_model
from kvtide.oracle_process import running_oracle
from tests.compose.harness import build, no_engine
from tests.faults.matrix.cells import DISK_CELLS, LINK_CELLS, SERVICE_CELLS, Cell
from tests.faults.matrix.containers import containers
from tests.faults.matrix.matrix import Matrix, table
from tests.faults.matrix.processes import processes


async def run(names: list[str], in_containers: bool) -> int:
    """The number of cells that failed."""
    chosen = partial(filter, lambda cell: not names or any(name in str(cell) for name in names))
    parts: list[tuple[list[Cell], bool]] = [
        (list(chosen(SERVICE_CELLS + DISK_CELLS)), False),
        (list(chosen(LINK_CELLS)), True),
    ]
    stack = containers if in_containers else processes
    started_s = time.monotonic()
    async with running_oracle(ensure_default_model()) as oracle:
        matrix = Matrix(oracle)
        for cells, links in parts:
            await matrix.run(cells, partial(stack, links))
    print(f"\nseconds until everything was answered and the stack at rest\n{table(matrix.results)}\n")
    figures = matrix.figures(sum(len(cells) for cells, _ in parts), time.monotonic() - started_s)
    print(json.dumps(figures | ({"test": "compose-faults"} if in_containers else {})))
    return min(int(figures["failed"]), 100)


async def main(arguments: list[str]) -> int:
    """Exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.matrix", description="The matrix of faults.")
    parser.add_argument("names", nargs="*", help="cells: those whose name (PART FAULT, ACTIVITY) holds one of these")
    parser.add_argument("--containers", action="store_true", help="the stack in containers")
    options = parser.parse_args(arguments)
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # so that nothing is left of the stack
    if options.containers:
        if reason := no_engine():
            print(reason)
            return 0
        await build()
    return await run(options.names, options.containers)


if __name__ == "__main__":
    with contextlib.suppress(asyncio.CancelledError):
        sys.exit(asyncio.run(main(sys.argv[1:])))
    sys.exit(128 + signal.SIGTERM)
