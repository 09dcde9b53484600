"""What a cell does to its stack. Each function returns once the fault is over, or can't be taken back."""

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from services.storage.test_hooks import CUT_FILE, FAIL_READ, FAIL_WRITE, SLOW_READ, SLOW_WRITE
from shared import test_hooks
from tests.faults.matrix.cells import LINKS, NEW_PROCESS, Cell
from tests.faults.matrix.stage import Stage, counting
from tests.faults.matrix.target import Target

PAUSE_S = 5.0  # longer than three missed heartbeats of a busy stack
LINK_FAULT_S = 5.0  # the same for a link
DISK_FAULT_S = 5.0  # some batches of pages, each way

DISK_HOOKS: dict[str, Mapping[str, str]] = {
    "full": {FAIL_WRITE: "ENOSPC"},
    "read-only": {FAIL_WRITE: "EROFS"},
    "slow": {SLOW_READ: "1.0", SLOW_WRITE: "1.0"},
    "failing": {FAIL_READ: "EIO", FAIL_WRITE: "EIO"},
    "truncating": {CUT_FILE: ""},
}
DISK_COUNTS = {
    "full": ("l3_dropped",),
    "read-only": ("l3_dropped",),
    "slow": ("l3_get_pages", "l3_set_pages"),
    "failing": ("l3_read_failed",),
    "truncating": ("l3_corrupt",),
}


async def hit(stage: Stage, cell: Cell) -> float:
    """Bring the requests where the cell wants them, and carry out its fault. Returns when it was over."""
    if cell.part == "disk":
        await hit_disk(stage, cell.fault)
        return time.monotonic()
    if cell.part in LINKS:
        await hit_link(stage, cell.part, cell.fault)
        return time.monotonic()
    await stage.begin(cell.activity)
    started_s = time.monotonic()
    await hit_service(stage.target, cell.part, cell.fault, PAUSE_S)
    return started_s if cell.fault in NEW_PROCESS else time.monotonic()


async def hit_service(target: Target, service: str, fault: str, seconds: float) -> None:
    """Kill, pause or restart a service; a new process is to come after the first and the last of these."""
    match fault:
        case "kill -9":
            await target.kill(service)
        case "restart":
            await target.restart(service)
        case "pause":
            await target.pause(service)
            try:
                await asyncio.sleep(seconds)
            finally:
                await target.resume(service)


async def hit_link(stage: Stage, link: str, fault: str) -> None:
    """Disturb a link while requests compute, write back and load back."""
    text = await stage.on_host()
    for each in (text, stage.fresh(), stage.fresh()):
        stage.ask(each)
    pieces = await stage.target.disturb(link, fault, LINK_FAULT_S)
    assert pieces > 0, f"nothing went over {link} while it was disturbed"


@contextmanager
def broken_disk(hooks: Path, fault: str) -> Iterator[None]:
    """The disk below L3 is broken inside."""
    for name, text in DISK_HOOKS[fault].items():
        test_hooks.arm(hooks, name, text)
    try:
        yield
    finally:
        for name in DISK_HOOKS[fault]:
            (hooks / name).unlink()


async def hit_disk(stage: Stage, fault: str) -> None:
    """Break the disk below L3 while a request reads from it and another one's pages are written."""
    async with counting(stage, *DISK_COUNTS[fault]):
        with broken_disk(stage.target.hooks, fault):
            stage.ask(stage.stored())
            stage.ask(stage.fresh())
            await asyncio.sleep(DISK_FAULT_S)
            for asked in stage.requests:
                await asked.answered()
