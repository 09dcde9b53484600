"""Virtual time: a queue of actions. Nothing in a simulation waits."""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

Action = Callable[..., None]


class Clock:
    """Runs actions in order of time, and of their scheduling where the times are equal."""

    def __init__(self) -> None:
        self.now = 0.0  # seconds
        self.steps = 0  # actions run so far
        self._queue: list[tuple[float, int, Action, tuple[Any, ...]]] = []
        self._number = 0

    def after(self, delay: float, action: Action, *args: Any) -> None:
        """Run `action(*args)` in `delay` seconds."""
        self.put(delay, action, args)

    def put(self, delay: float, action: Action, args: tuple[Any, ...]) -> None:
        """The same, with the arguments at hand."""
        self._number += 1
        heappush(self._queue, (self.now + delay, self._number, action, args))

    def step(self) -> bool:
        """Run the next action. False when there is none."""
        if not self._queue:
            return False
        self.now, _, action, args = heappop(self._queue)
        self.steps += 1
        action(*args)
        return True
