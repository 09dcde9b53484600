"""What a cell does to its stack. Each function returns once the fault is over, or can't be taken back."""

import asyncio
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from kvtide.stack import Stack
from services.storage.test_hooks import CUT_FILE, FAIL_READ, FAIL_WRITE, SLOW_READ, SLOW_WRITE
from tests.faults.matrix.stage import Stage, counting
from tests.faults.proxy import TcpProxy

PAUSE_S = 5.0  # longer than three missed heartbeats of a busy stack
LINK_FAULT_S = 5.0  # the same for a link
DISK_FAULT_S = 5.0  # some batches of pages, each way
DELAY_S = 0.2  # of each piece of up to 64 KiB
RESETS = 5
CORRUPT_EVERY = 5  # pieces, one of which has a flipped bit
RATES = {"gpu_worker-storage": 1_000_000}  # bytes/s: a page of the small stack has 0.7 MB
CONTROL_RATE = 5_000  # bytes/s: a heartbeat has some 500, a step 1,000

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


async def hit_service(stack: Stack, identity: str, fault: str, seconds: float) -> None:
    """Kill, pause or restart a service; a new process is to come after the first and the last of these."""
    match fault:
        case "kill -9":
            stack.kill(identity, signal.SIGKILL)
        case "restart":
            stack.kill(identity, signal.SIGTERM)
        case "pause":
            stack.kill(identity, signal.SIGSTOP)
            try:
                await asyncio.sleep(seconds)
            finally:
                stack.kill(identity, signal.SIGCONT)


async def disturb(proxy: TcpProxy, link: str, fault: str, seconds: float) -> None:
    """Disturb a link for a time, while traffic goes on."""
    try:
        match fault:
            case "delay":
                proxy.delay_s = DELAY_S
            case "stall":
                proxy.stall()
            case "reset":
                for _ in range(RESETS - 1):
                    proxy.reset()
                    await asyncio.sleep(seconds / RESETS)
                proxy.reset()
                seconds /= RESETS
            case "corrupt":
                proxy.corrupt_every = CORRUPT_EVERY
            case "throttle":
                proxy.rate = RATES.get(link, CONTROL_RATE)
        await asyncio.sleep(seconds)
    finally:
        proxy.delay_s, proxy.rate, proxy.corrupt_every = 0.0, 0.0, 0
        proxy.resume()


@contextmanager
def broken_disk(hooks: Path, fault: str) -> Iterator[None]:
    """The disk below L3 is broken inside."""
    files = [hooks / name for name in DISK_HOOKS[fault]]
    for file in files:
        file.write_text(DISK_HOOKS[fault][file.name])
    try:
        yield
    finally:
        for file in files:
            file.unlink()


async def hit_disk(stage: Stage, fault: str) -> None:
    """Break the disk below L3 while a request reads from it and another one's pages are written."""
    async with counting(stage, *DISK_COUNTS[fault]):
        with broken_disk(stage.hooks, fault):
            stage.ask(stage.stored())
            stage.ask(stage.fresh())
            await asyncio.sleep(DISK_FAULT_S)
            for asked in stage.requests:
                await asked.answered()
