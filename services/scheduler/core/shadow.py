"""A small cache of sampled pages without bytes: what hit rate would another choice give on this traffic?

A page's parent is its nearest sampled ancestor, so a shadow is a tree as the real one, a sample's share of its size
(SHARDS; Waldspurger et al., FAST 2015).
"""

from services.scheduler.core.hazard import CLASSES
from services.scheduler.core.leaves import Entry, Key
from services.scheduler.core.ranked_leaves import Choice, RankedLeaves


class _Page:
    __slots__ = ("children", "entry", "kind", "last_access", "locked", "number", "parent")

    def __init__(self, number: int, parent: "_Page | None") -> None:
        self.number = number
        self.parent = parent
        self.children = 0
        self.kind = 0  # frequency class
        self.last_access = 0
        self.locked = False
        self.entry: Entry | None = None


def _order(page: _Page) -> Key:
    return (page.kind, page.last_access)


def _evictable(page: _Page) -> bool:
    return not page.children and not page.locked


class Shadow:
    """One choice on trial."""

    def __init__(self, capacity: int, choose: Choice) -> None:
        self.hits = 0.0  # sampled pages found, the caller lets them fade
        self._capacity = capacity  # sampled pages
        self._pages: dict[int, _Page] = {}
        self._leaves = RankedLeaves[_Page]("entry", CLASSES, _order, _evictable, choose)

    def use(self, hashes: list[int], classes: list[int], clock: int) -> None:
        """The sampled pages of one request, in order."""
        found = next((i for i, number in enumerate(hashes) if number not in self._pages), len(hashes))
        self.hits += found
        path: list[_Page] = []
        for number in hashes[:found]:
            page = self._pages[number]
            page.locked = True
            self._leaves.discard(page)
            path.append(page)
        for number in hashes[found:]:
            if len(self._pages) >= self._capacity and not self._evict():
                break
            page = self._pages[number] = _Page(number, path[-1] if path else None)
            if path:
                path[-1].children += 1
            page.locked = True
            path.append(page)
        for page, kind in zip(path, classes, strict=False):
            page.kind, page.last_access, page.locked = kind, clock, False
        for page in path:
            self._leaves.offer(page)

    def _evict(self) -> bool:
        page = self._leaves.pop()
        if page is None:
            return False
        del self._pages[page.number]
        if page.parent is not None:
            page.parent.children -= 1
            self._leaves.offer(page.parent)
        return True
