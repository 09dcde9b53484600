"""Live regret: what the best possible cache would have given of late, beside what the tiers gave (POLICY-03).

The scheduler remembers sampled pages of the last requests; of them a page's parent is its nearest sampled ancestor, and
a cache of a sample's share of the pages stands for the whole one (SHARDS; Waldspurger et al., FAST 2015). The first
half of the window warms the optimum up, the second is compared.
"""

from collections import deque
from typing import NamedTuple

import numpy as np

from services.scheduler.core.belady import Belady, Segment
from services.scheduler.core.frequency import prefix_hashes

WINDOW = 1024  # requests: some minutes of a busy stack
MAX_SAMPLES = 8192  # pages in the window; beyond it the sample is halved. A comparison then takes some 10 ms
EVERY = 64  # requests between two comparisons, however often somebody asks
DIGITS = 4  # of a rate


class _Seen(NamedTuple):
    """One request."""

    samples: list[int]  # hashes of its sampled pages, in order
    hits: int  # of them on device or host
    pages: int  # whole pages
    tokens: int  # of the prompt
    hit_tokens: int  # of device and host


class Regret(NamedTuple):
    """Of the second half of the window."""

    requests: int
    hit_rate: float  # tokens from device and host / prompt tokens
    optimal_hit_rate: float  # of a cache of as many pages that knows the future


class Window:
    """The last requests."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._seen: deque[_Seen] = deque()
        self.sample = 1  # one page in so many, a power of two
        self.samples = 0  # pages in the window
        self._since = 0  # requests, after the last comparison
        self._found: Regret | None = None

    def __len__(self) -> int:
        return len(self._seen)

    def observe(self, seed: bytes, tokens: bytes, hit_tokens: int) -> None:
        """A request was admitted. tokens: its prompt, packed int32; the last one never comes from a cache."""
        hashes = prefix_hashes(seed, tokens[:-4], self._page_size)
        sampled = hashes % np.uint64(self.sample) == 0
        hits = int(np.count_nonzero(sampled[: hit_tokens // self._page_size]))
        self._seen.append(_Seen(hashes[sampled].tolist(), hits, len(hashes), len(tokens) // 4, hit_tokens))
        self.samples += len(self._seen[-1].samples)
        self._since += 1
        if len(self._seen) > WINDOW:
            self.samples -= len(self._seen.popleft().samples)
            if self.samples < MAX_SAMPLES // 8 and self.sample > 1:
                self.sample //= 2  # prompts have become shorter
        while self.samples > MAX_SAMPLES:
            self._thin()

    def _thin(self) -> None:
        """Halve the sample."""
        self.sample *= 2
        mask = self.sample - 1
        for _ in range(len(self._seen)):
            old = self._seen.popleft()
            kept = [number for number in old.samples if not number & mask]
            hits = sum(not number & mask for number in old.samples[: old.hits])
            self._seen.append(old._replace(samples=kept, hits=hits))
        self.samples = sum(len(each.samples) for each in self._seen)

    def compare(self, pages: int) -> Regret | None:
        """With the optimum of `pages` pages. None until there are a few requests to compare."""
        if self._since >= EVERY:
            self._since = 0
            self._found = self._compare(pages)
        return self._found

    def _compare(self, pages: int) -> Regret | None:
        best = self._optimum(max(1, pages // self.sample))
        half = len(self._seen) // 2
        later = list(self._seen)[half:]
        samples, tokens = sum(len(each.samples) for each in later), sum(each.tokens for each in later)
        if not samples:
            return None
        live = sum(each.hit_tokens for each in later) / tokens
        # What both have in the sample cancels out, and with it most of the sample's error.
        gained = (sum(best[half:]) - sum(each.hits for each in later)) / samples
        share = sum(each.pages for each in later) * self._page_size / tokens
        optimal = min(max(live, live + gained * share), 1.0)
        return Regret(len(later), round(live, DIGITS), round(optimal, DIGITS))

    def _optimum(self, pages: int) -> list[int]:
        """Sampled hits of each request. What the tiers had from before the window, the optimum is given too."""
        segments: dict[int, Segment] = {}
        known: list[int] = []  # leading samples of each request that an earlier one had
        paths: list[list[Segment]] = []
        for each in self._seen:
            known.append(sum(number in segments for number in each.samples))
            path = [segments.setdefault(number, Segment(at, 1)) for at, number in enumerate(each.samples)]
            paths.append(path)
        hits = Belady(paths).hits(pages)
        return [
            max(count, each.hits) if count == old else count
            for count, old, each in zip(hits, known, self._seen, strict=True)
        ]
