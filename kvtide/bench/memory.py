"""How much memory some processes take together, and whether it grows."""

import asyncio
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path

SAMPLE_S = 0.5  # a reading of four processes takes about 5 ms
WARM_UP_S = 15.0  # allocators, caches and the host pool fill
WINDOWS = 2  # the time after the warm-up in as many parts: long ones, since activations come and go with each step


def proportional_set_size(pids: Iterable[int]) -> int:
    """Summed PSS in bytes: shared pages count once. A process that has ended counts as 0."""
    return sum(map(_one, pids))


def _one(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:"))


async def sample(pids: Callable[[], Iterable[int]], samples: list[tuple[float, int]]) -> None:
    """Append (seconds since the start, bytes) to `samples` until cancelled."""
    started = time.monotonic()
    while True:
        size = await asyncio.to_thread(proportional_set_size, list(pids()))
        samples.append((time.monotonic() - started, size))
        await asyncio.sleep(SAMPLE_S)


def growth(samples: list[tuple[float, int]]) -> float:
    """Relative growth after the warm-up, between the medians of the first and of the last window.

    0 when the samples end before there are two windows to compare.
    """
    late = [size for at, size in samples if at >= WARM_UP_S]
    width = len(late) // WINDOWS
    if not width:
        return 0.0
    return statistics.median(late[-width:]) / statistics.median(late[:width]) - 1.0
