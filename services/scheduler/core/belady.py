"""The best that any cache of a size can do: Belady's rule with bypass, which knows the future.

It keeps the pages whose next use is nearest, and takes a new page only where its next use is nearer than that of one
that goes. A page's parent is used whenever the page is, so what is kept is always closed towards the root, and the rule
is exact for prefixes (L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", 1966).

Pages that the same requests use form a segment; the work is for each segment of a request's path, not for each page.
"""

import heapq

NEVER = 2**62  # next use of pages that no request uses any more


class Segment:
    """Consecutive pages that are used by the same requests."""

    __slots__ = ("cached", "depth", "next_use", "pages")

    def __init__(self, depth: int, pages: int) -> None:
        self.depth = depth  # pages before it
        self.pages = pages
        self.cached = 0  # leading pages that the optimum has
        self.next_use = NEVER


class Belady:
    """Some requests, each with its path from the root."""

    def __init__(self, paths: list[list[Segment]]) -> None:
        self._paths = paths
        self._next_uses = _next_uses(paths)

    def hits(self, capacity: int) -> list[int]:
        """Leading pages of each request that the best possible cache of `capacity` pages has when it comes."""
        for path in self._paths:
            for segment in path:
                segment.cached, segment.next_use = 0, NEVER
        cache = _Cache(capacity)
        hits = []
        for path, next_uses in zip(self._paths, self._next_uses, strict=True):
            hits.append(_leading(path))
            for segment, next_use in zip(path, next_uses, strict=True):
                cache.renew(segment, next_use)
            for segment in path:
                if not cache.fill(segment):
                    break
        return hits


def _leading(path: list[Segment]) -> int:
    found = 0
    for segment in path:
        found += segment.cached
        if segment.cached < segment.pages:
            break
    return found


def _next_uses(paths: list[list[Segment]]) -> list[list[int]]:
    """For each request and segment of its path the next request that uses the segment."""
    later: dict[Segment, int] = {}
    ahead: list[list[int]] = []
    for number in range(len(paths) - 1, -1, -1):
        ahead.append([later.get(segment, NEVER) for segment in paths[number]])
        later.update(dict.fromkeys(paths[number], number))
    return ahead[::-1]


class _Cache:
    """The optimum's content, the page used last on top."""

    def __init__(self, capacity: int) -> None:
        self._free = capacity
        self._heap: list[tuple[int, int, int, Segment]] = []  # (-next use, -depth, tie, segment)
        self._number = 0

    def renew(self, segment: Segment, next_use: int) -> None:
        """The segment has just been used. Pages that never will be again go at once."""
        segment.next_use = next_use
        if next_use == NEVER:
            self._free += segment.cached
            segment.cached = 0
        elif segment.cached:
            self._push(segment)

    def fill(self, segment: Segment) -> bool:
        """Take the rest of a segment as far as it is worth it. False when not all of it was."""
        if segment.next_use == NEVER:
            return False
        had = segment.cached
        while segment.cached < segment.pages:
            taken = min(self._free or self._evict(segment), segment.pages - segment.cached)
            if not taken:
                break
            self._free -= taken
            segment.cached += taken
        if segment.cached and not had:
            self._push(segment)
        return segment.cached == segment.pages

    def _evict(self, wanted: Segment) -> int:
        """Make room by pages that are used later than `wanted`; returns the number of free pages."""
        while self._heap:
            negative_use, negative_depth, _, segment = self._heap[0]
            if not segment.cached or segment.next_use != -negative_use:
                heapq.heappop(self._heap)
                continue
            if (-negative_use, -negative_depth) <= (wanted.next_use, wanted.depth):
                return 0
            gone = min(segment.cached, wanted.pages - wanted.cached)
            segment.cached -= gone
            self._free += gone
            return gone
        return 0

    def _push(self, segment: Segment) -> None:
        self._number += 1
        heapq.heappush(self._heap, (-segment.next_use, -segment.depth, self._number, segment))
