"""Learns how likely a page is used again soon, by how often it was used and how long ago.

The rate of reuse of pages of one frequency class at one age: uses there over the time that sampled pages spent there
(after LHD, Beckmann, Chen and Cidon, NSDI 2018). Time is the tree's clock.
"""

import numpy as np
from numpy.typing import NDArray

CLASSES = 8  # frequencies 1, 2, 3, 4, 5-6, 7-10, 11-20, more
AGES = 24  # powers of two of AGE_UNIT: days at 100 walks a second
AGE_UNIT = 3  # ticks, one to two requests: what was used a moment ago is of one age
HISTORY = 32768  # sampled pages that are remembered: 1 MB, about 10 ms for a fit
FADE = 0.9  # what earlier observations count, fit after fit

CLASS_OF = np.searchsorted([1, 2, 3, 4, 6, 10, 20], np.arange(256)).astype(np.int64)
_LOW = AGE_UNIT * np.concatenate([[0.0], 2.0 ** np.arange(AGES - 1)])
_HIGH = np.append(_LOW[1:], AGE_UNIT * 2.0 ** (AGES - 1))

Slots = NDArray[np.int64]


def age_bucket(age: int) -> int:
    """The row's column for an age."""
    return min((age // AGE_UNIT).bit_length(), AGES - 1)


class Hazard:
    """Observations of sampled pages, and the rates that follow."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}  # by hash
        self._hashes = [0] * HISTORY
        self._next = 0
        self._class = np.zeros(HISTORY, np.int64)
        self._last = np.full(HISTORY, -1, np.int64)  # clock of the last use; -1 = no page
        self._from = np.zeros(HISTORY, np.int64)  # age up to which it was counted
        self._uses = np.zeros((CLASSES, AGES))
        self._time = np.zeros((CLASSES, AGES))

    def used(self, hashes: list[int], classes: NDArray[np.int64], clock: int) -> None:
        """Sampled pages of one request, each once, with the classes that they have now."""
        slots = np.array([self._slot(number) for number in hashes], np.int64)
        known = slots[self._last[slots] >= 0]
        ages = clock - self._last[known]
        self._spend(known, ages)
        buckets = np.minimum(np.ceil(np.log2(ages // AGE_UNIT + 1)).astype(np.int64), AGES - 1)
        np.add.at(self._uses, (self._class[known], buckets), 1)
        self._class[slots], self._last[slots], self._from[slots] = classes, clock, 0

    def _slot(self, number: int) -> int:
        slot = self._slots.get(number)
        if slot is None:
            slot, self._next = self._next, (self._next + 1) % HISTORY
            if self._last[slot] >= 0:
                del self._slots[self._hashes[slot]]
            self._slots[number], self._hashes[slot] = slot, number
            self._last[slot] = -1
        return slot

    def _spend(self, slots: Slots, ages: NDArray[np.int64]) -> None:
        """Count the time that pages have spent in each age since it was last counted."""
        spent = np.minimum(ages[:, None], _HIGH) - np.maximum(self._from[slots][:, None], _LOW)
        places = self._class[slots][:, None] * AGES + np.arange(AGES)
        total = np.bincount(places.ravel(), np.maximum(spent, 0.0).ravel(), CLASSES * AGES)
        self._time += total.reshape(CLASSES, AGES)

    def observe(self, clock: int) -> None:
        """Let old observations fade, and count the time of pages that nobody used: that is evidence too."""
        self._uses *= FADE
        self._time *= FADE
        slots = np.flatnonzero(self._last >= 0)
        ages = clock - self._last[slots]
        self._spend(slots, ages)
        self._from[slots] = ages

    def rates(self, horizon: float) -> list[list[float]]:
        """[class][age] -> uses per tick in the next `horizon` ticks, at least until the age has doubled.

        Where little was seen the class's mean counts, where nothing was seen the mean of all.
        """
        until = np.maximum(_HIGH, _LOW + horizon)
        share = np.clip((np.minimum(until[:, None], _HIGH) - _LOW) / (_HIGH - _LOW), 0.0, 1.0)
        share = np.triu(share)
        mean = max(self._uses.sum(), 1e-9) / max(self._time.sum(), 1.0)
        of_class = (self._uses.sum(1) + 1.0) / (self._time.sum(1) + 1.0 / mean)
        rates: list[list[float]] = (
            (self._uses @ share.T + 1.0) / (self._time @ share.T + 1.0 / of_class[:, None])
        ).tolist()
        return rates
