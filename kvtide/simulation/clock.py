"""Virtual time: a queue of actions. Nothing in a simulation waits."""

import heapq
from collections.abc import Callable

Action = Callable[[], None]


class Clock:
    """Runs actions in order of time, and of their scheduling where the times are equal."""

    def __init__(self) -> None:
        self.now = 0.0  # seconds
        self.steps = 0  # actions run so far
        self._queue: list[tuple[float, int, Action]] = []
        self._number = 0

    def after(self, delay: float, action: Action) -> None:
        """Run `action` in `delay` seconds."""
        self._number += 1
        heapq.heappush(self._queue, (self.now + delay, self._number, action))

    def step(self) -> bool:
        """Run the next action. False when there is none."""
        if not self._queue:
            return False
        self.now, _, action = heapq.heappop(self._queue)
        self.steps += 1
        action()
        return True
