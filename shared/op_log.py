"""A receiver's memory of operations, so that a repeated command is answered and not done twice."""

from collections import OrderedDict
from enum import Enum

from shared.messages.common import Message

KEPT_RESULTS = 4096  # a core keeps far fewer operations in flight with one peer


class Seen(Enum):
    """What an op_id is to its receiver."""

    NEW = "new"
    RUNNING = "running"
    DONE = "done"
    STALE = "stale"


class OpLog:
    """What runs, and the last results by op_id. An id that is older than what is kept is stale."""

    def __init__(self) -> None:
        self._running: set[int] = set()
        self._results: OrderedDict[int, Message] = OrderedDict()
        self._floor = 0

    def begin(self, op_id: int) -> Seen:
        """Register a command. Only NEW ones are to be carried out."""
        if op_id in self._running:
            return Seen.RUNNING
        if op_id in self._results:
            return Seen.DONE
        if op_id <= self._floor:
            return Seen.STALE
        self._running.add(op_id)
        return Seen.NEW

    def finish(self, op_id: int, result: Message) -> None:
        """Keep the answer to a command that runs."""
        if op_id not in self._running:
            return
        self._running.discard(op_id)
        self._results[op_id] = result
        if len(self._results) > KEPT_RESULTS:
            oldest, _ = self._results.popitem(last=False)
            self._floor = max(self._floor, oldest)

    def fence(self, op_id: int) -> None:
        """Commands older than a fence that come after it are stale."""
        self._floor = max(self._floor, op_id - 1)

    def knows(self, op_id: int) -> bool:
        """Was the command ever begun? True for one that is too old to tell."""
        return op_id in self._running or op_id in self._results or op_id <= self._floor

    def result(self, op_id: int) -> Message | None:
        """The kept answer, None while it runs."""
        return self._results.get(op_id)

    def running(self) -> list[int]:
        """op_ids without an answer."""
        return sorted(self._running)

    def clear(self) -> None:
        """Forget everything: the scheduler was replaced."""
        self._running.clear()
        self._results.clear()
        self._floor = 0
