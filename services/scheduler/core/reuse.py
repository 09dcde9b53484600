"""`eviction = "auto"` (POLICY-02): watches which pages are used again, and evicts by whichever choice would do best.

requests -> frequencies (every page) -> hazard rates and shadows (sampled pages) -> what leaves each tier first
"""

import numpy as np

from services.scheduler.core.frequency import Frequencies, Hashes, prefix_hashes
from services.scheduler.core.hazard import CLASS_OF, CLASSES, Hazard, Slots, age_bucket
from services.scheduler.core.leaves import Key, LeafHeap, device_evictable, host_evictable
from services.scheduler.core.node import Node
from services.scheduler.core.pages import HostPool
from services.scheduler.core.ranked_leaves import Choice, RankedLeaves
from services.scheduler.core.shadow import Shadow

SAMPLE = 8  # one page in so many teaches the hazard rates
SHADOW_PAGES = 2048  # of a shadow; a larger tier is sampled more thinly
FIT_EVERY = 100  # requests between two fits: 10 ms of work
EARLY_FITS = (4, 10, 25, 50)  # requests: a young tree learns fast
SHADOW_FADE = 0.9  # of a shadow's hits, fit after fit
MARGIN = 0.01  # a choice must be better by this share before it is followed

RESIDENT = CLASSES  # class of host copies whose pages are on the device too
_MIX = np.uint64(0x9FB21C651E98DF25)


def oldest(heads: list[Key]) -> int:
    """lru: the least recently used of all."""
    return min(heads, key=lambda key: key[1])[0]


class Ranking:
    """What leaves one tier first."""

    def __init__(self, capacity: int, hazard: Hazard) -> None:
        self.follows = "lru"
        self.evicted = 0  # pages, since the last fit
        self.clock = 0
        self._capacity = capacity  # pages
        self._hazard = hazard
        self._rates = hazard.rates(0.0)
        self._fitted = 0  # the clock then
        self._choices: dict[str, Choice] = {"lru": oldest, "hazard": self.least_likely}
        self._sample = SAMPLE
        while self._sample * SHADOW_PAGES < capacity:
            self._sample *= 2
        self._shadows = {
            name: Shadow(max(1, capacity // self._sample), choice) for name, choice in self._choices.items()
        }

    def least_likely(self, heads: list[Key]) -> int:
        """hazard: the one with the lowest rate of reuse, the older of equals."""
        return min(heads, key=lambda key: (self._rates[key[0]][age_bucket(max(0, self.clock - key[1]))], key[1]))[0]

    def choose(self, heads: list[Key]) -> int:
        """The class whose head goes next, by the choice that is followed."""
        return self._choices[self.follows](heads)

    def used(self, hashes: Hashes, kinds: Slots) -> None:
        """Show one request to the shadows."""
        sampled = (hashes % np.uint64(self._sample)) == 0
        names, classes = hashes[sampled].tolist(), kinds[sampled].tolist()
        for shadow in self._shadows.values():
            shadow.use(names, classes, self.clock)

    def fit(self) -> None:
        """Take the new rates, and follow the choice whose shadow had most hits of late."""
        ticks, self._fitted = self.clock - self._fitted, self.clock
        turnover = self._capacity * ticks / self.evicted if self.evicted else float(ticks)
        self.evicted = 0
        self._rates = self._hazard.rates(turnover)
        best = max(self._shadows, key=lambda name: self._shadows[name].hits)
        if self._shadows[best].hits > (1 + MARGIN) * self._shadows[self.follows].hits:
            self.follows = best
        for shadow in self._shadows.values():
            shadow.hits *= SHADOW_FADE


class Reuse:
    """Observes requests on behalf of all tiers."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._frequencies = Frequencies()
        self._hazard = Hazard()
        self._requests = 0
        self.device = Ranking(1, self._hazard)
        self.hosts: dict[HostPool, Ranking] = {}
        self.device_leaves = RankedLeaves[Node](
            "device_entry", CLASSES, _order, device_evictable, lambda heads: self.device.choose(heads)
        )

    def resize_device(self, pages: int) -> None:
        """A new device pool."""
        self.device = Ranking(pages, self._hazard)

    def host_leaves(self, pool: HostPool, *, small: bool) -> LeafHeap[Node]:
        """Evictable leaves of a new host pool. small: it is the smaller pool, copies of resident nodes go first."""
        ranking = self.hosts[pool] = Ranking(pool.total, self._hazard)

        def choose(heads: list[Key]) -> int:
            others = [key for key in heads if key[0] != RESIDENT]
            return ranking.choose(others) if others and not (small and len(others) < len(heads)) else RESIDENT

        return RankedLeaves[Node]("host_entry", CLASSES + 1, _host_order, host_evictable, choose)

    def observe(self, seed: bytes, tokens: bytes, clock: int) -> bytes:
        """A request was admitted: returns how often each of its whole pages was used of late, saturating at 255."""
        hashes = prefix_hashes(seed, tokens, self._page_size)
        counts = self._frequencies.add(hashes)
        kinds = CLASS_OF[counts]
        numbers = (hashes * _MIX) >> np.uint64(20)
        sampled = (numbers % np.uint64(SAMPLE)) == 0
        self.hosts = {pool: ranking for pool, ranking in self.hosts.items() if not pool.dead}
        rankings = [self.device, *self.hosts.values()]
        for ranking in rankings:
            ranking.clock = clock
            ranking.used(numbers, kinds)
        self._hazard.used(numbers[sampled].tolist(), kinds[sampled], clock)
        self._requests += 1
        if self._requests % FIT_EVERY == 0 or self._requests in EARLY_FITS:
            self._hazard.observe(clock)
            for ranking in rankings:
                ranking.fit()
        return counts.tobytes()


def mark(path: list[Node], frequencies: bytes, leaves: LeafHeap[Node]) -> None:
    """Note on the nodes of a path from the root how often their pages were used; the rest of it is new.

    A node that is a leaf already moves to its class in `leaves`.
    """
    at = 0
    for node in path:
        node.frequencies = frequencies[at : at + node.pages].ljust(node.pages, b"\1")
        at += node.pages
        leaves.offer(node)


def frequency_class(node: Node) -> int:
    """The class of the node's last page: eviction takes nodes from their end."""
    return int(CLASS_OF[node.frequencies[-1]]) if node.frequencies else 0


def _order(node: Node) -> Key:
    return (frequency_class(node), node.last_access)


def _host_order(node: Node) -> Key:
    return (frequency_class(node) if node.value is None else RESIDENT, node.last_access)


def last_of_a_kind(node: Node) -> int:
    """How many pages at the node's end are of one class."""
    kind = frequency_class(node)
    for count, frequency in enumerate(reversed(node.frequencies)):
        if CLASS_OF[frequency] != kind:
            return count
    return node.pages
