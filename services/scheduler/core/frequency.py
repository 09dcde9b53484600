"""How often each page was asked for, of late, whether or not a tier still has it.

A count-min sketch with conservative update and halving (TinyLFU; Einziger et al., 2017), over hashes of whole prefixes.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]

ROWS = 2
WIDTH = 2**20  # counters in a row, 1 MiB: 200,000 pages collide in both rows at 3 % of them
HALVE_AFTER = 4 * WIDTH  # additions: what was hot long ago counts less
MOST = 255

_WORD = np.uint64(0x9E3779B97F4A7C15)  # odd multipliers: any will do, they are fixed so that runs can be repeated
_STEP = np.uint64(0xD1B54A32D192ED03)
_MIX, _ONE, _29, _31 = (np.array(number, np.uint64) for number in (0xBF58476D1CE4E5B9, 1, 29, 31))  # soonest taken so


def prefix_hashes(seed: bytes, tokens: bytes, page_size: int) -> Hashes:
    """One 64-bit hash for each whole page of `tokens` (packed int32), of the page and all before it.

    Not cryptographic: equal hashes of two prefixes only blur a statistic.
    """
    pages = len(tokens) // (4 * page_size)
    words = np.frombuffer(tokens, np.uint32, pages * page_size).reshape(pages, page_size).astype(np.uint64)
    own = _mixed((words + _ONE) @ _powers(_WORD, page_size))
    start = np.uint64(int.from_bytes(seed[:8].ljust(8, b"\0"), "little"))
    return _mixed(np.cumsum(own * _powers(_STEP, pages)) + start)


@lru_cache(maxsize=256)
def _powers(base: np.uint64, count: int) -> Hashes:
    return np.cumprod(np.full(count, base), dtype=np.uint64)


def _mixed(values: Hashes) -> Hashes:
    values = (values ^ (values >> _31)) * _MIX
    return values ^ (values >> _29)


class Frequencies:
    """Counts that fade."""

    def __init__(self, width: int = WIDTH) -> None:
        self._rows = np.zeros((ROWS, width), np.uint8)
        self._mask = np.uint64(width - 1)
        self._halve_after = HALVE_AFTER * width // WIDTH
        self._added = 0

    def add(self, hashes: Hashes) -> NDArray[np.uint8]:
        """Count one use of each page; returns the counts, this use included."""
        places = [(hashes >> np.uint64(shift)) & self._mask for shift in (0, 32)]
        found = [row[place] for row, place in zip(self._rows, places, strict=True)]
        counts: NDArray[np.uint8] = np.minimum(np.minimum(*found), MOST - 1) + np.uint8(1)
        for row, place, old in zip(self._rows, places, found, strict=True):
            row[place] = np.maximum(old, counts)
        self._added += len(hashes)
        if self._added >= self._halve_after:
            self._rows >>= 1
            self._added //= 2
        return counts
