"""Load or recompute (TIER-12): what copies and prefills took of late, and which of them gives the first token sooner.

A load comes in layer by layer beside the prefill of what follows it, a fetch from L3 before both.
"""

from services.scheduler.core.operations import Load, Operation, Prefetch, Step
from shared.messages.common import INT_BYTES, Message
from shared.messages.storage import PrefetchDone
from shared.messages.worker import LoadDone, StepDone

FADE = 0.9  # what earlier work counts, observation after observation: some ten count
TRY_AFTER = 16  # refusals after which a copy is made all the same: its speed may have changed


class Speed:
    """Of one kind of work."""

    def __init__(self) -> None:
        self._units = 0.0
        self._seconds = 0.0
        self._refused = 0  # since it was last seen

    def saw(self, units: int, seconds: float) -> None:
        """So many tokens or pages took so long."""
        if units:
            self._units = FADE * self._units + units
            self._seconds = FADE * self._seconds + seconds
            self._refused = 0

    def refused(self) -> None:
        """It was not done, for being slow."""
        self._refused += 1

    @property
    def known(self) -> bool:
        """Can it be judged by what was seen?"""
        return self._units > 0 and self._refused < TRY_AFTER

    def seconds(self, units: int) -> float:
        """How long so many would take."""
        return units * self._seconds / self._units if self._units else 0.0


class Speeds:
    """Prefill by tokens, load (host -> device) and fetch (L3 -> host) by pages."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self.prefill, self.load, self.fetch = Speed(), Speed(), Speed()

    def ended(self, operation: Operation, message: Message) -> None:
        """Learn from the last answer to an operation."""
        if isinstance(operation, Step):
            if isinstance(message, StepDone) and not operation.waits:  # else it has waited for loads
                tokens = sum([count for _, _, count, _ in operation.requests])
                if tokens >= self._page_size:  # a decode's speed is another
                    self.prefill.saw(tokens, message.compute_s)
        elif isinstance(operation, Load) and isinstance(message, LoadDone):
            self.load.saw(len(operation.host_pages), message.seconds)
        elif isinstance(operation, Prefetch) and isinstance(message, PrefetchDone):
            self.fetch.saw(len(message.named) // INT_BYTES, message.seconds)

    def load_is_slower(self, pages: int, tokens: int) -> bool:
        """Than to compute all `tokens` of a prompt that the device lacks, of which host memory has `pages` pages?"""
        judged = self.prefill.known and self.load.known
        return judged and self.load.seconds(pages) > self.prefill.seconds(tokens)

    def fetch_is_slower(self, pages: int, tokens: int) -> bool:
        """The same for pages of L3."""
        if not (self.prefill.known and self.fetch.known):
            return False
        rest = self.prefill.seconds(tokens - pages * self._page_size)
        return self.fetch.seconds(pages) + max(self.load.seconds(pages), rest) > self.prefill.seconds(tokens)
