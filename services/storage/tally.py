"""Counters that I/O threads and the event loop raise together."""

import logging
import threading
from collections import Counter

log = logging.getLogger("kvtide.storage")


class Tally:
    """Named counts. `note` also logs the first event of each kind, so that a broken disk doesn't flood the log."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str, amount: int = 1) -> None:
        """Raise a count."""
        with self._lock:
            self._counts[name] += amount

    def note(self, name: str, detail: object) -> None:
        """Count a failure; the first one of each name is logged."""
        self.add(name)
        if self[name] == 1:
            log.warning("l3_trouble kind=%s detail=%s", name, detail)

    def __getitem__(self, name: str) -> int:
        with self._lock:
            return self._counts[name]
