"""Stop strings in a stream of text."""

from typing import NamedTuple


class Cut(NamedTuple):
    """Text that may be shown, and whether a stop string was met right after it."""

    text: str
    stopped: bool


class StopMatcher:
    """Holds text back while it may be the beginning of a stop string, however tokens cut it."""

    def __init__(self, stops: list[str]) -> None:
        self._stops = stops
        self._held = ""

    def feed(self, text: str) -> Cut:
        """Take more text. After `stopped` nothing may be fed."""
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            return Cut(self._held[: min(found)], True)
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return Cut(shown, False)

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
