"""How long a store's batches take, as numbers of a heartbeat that add up to a Prometheus histogram."""

import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable
from typing import TypeVar

BOUNDS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)  # a page from memory to a store that is given up

T = TypeVar("T")


class Latency:
    """Of one kind of batch. Belongs to the event loop."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        """name: begins the names in `stats`."""
        self._name = name
        self._clock = clock
        self._seconds = 0.0
        self._counts = [0] * (len(BOUNDS_S) + 1)

    async def of(self, work: Awaitable[T]) -> T:
        """Await a batch and count its time, from here to its end, whatever that is."""
        start_s = self._clock()
        try:
            return await work
        finally:
            seconds = self._clock() - start_s
            self._seconds += seconds
            self._counts[bisect_left(BOUNDS_S, seconds)] += 1

    def stats(self) -> dict[str, float]:
        """NAME_seconds, NAME_batches, and NAME_le_BOUND: how many batches took at most so many seconds."""
        upto, total = {}, 0
        for bound, count in zip(BOUNDS_S, self._counts, strict=False):
            total += count
            upto[f"{self._name}_le_{bound:g}"] = float(total)
        return {f"{self._name}_seconds": self._seconds, f"{self._name}_batches": float(sum(self._counts)), **upto}
