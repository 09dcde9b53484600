"""A hold on the worker's threads, for tests in which order is what counts."""

import threading

import pytest

from shared import test_hooks
from tests.unit.gpu_worker.service.fake_scheduler import WAIT_S


class Gate:
    """Holds the worker at one visit of one point until the test, or another thread, lets it go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, point: str, visit: int) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        self.visits: list[str] = []
        self._point, self._visit = point, visit
        monkeypatch.setattr(test_hooks, "reach", self._reach)

    def _reach(self, point: str) -> str:
        self.visits.append(point)
        if point == self._point and self.visits.count(point) == self._visit:
            self.reached.set()
            assert self.open.wait(WAIT_S)
        return ""
