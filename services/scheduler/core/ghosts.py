"""What each tier once had, and why it hasn't any more: a bounded memory, by page digest."""

from collections.abc import Iterable
from typing import Literal, NamedTuple

from services.scheduler.core.events import GPU, Medium
from services.scheduler.core.node import Node
from services.scheduler.core.tree import RadixTree

MAX_GHOSTS = 65_536  # pages remembered for each tier, the oldest go first: 4 million tokens of 64 a page, 10 MB

Tier = Literal["device", "host", "storage"]
TIERS: tuple[Tier, ...] = ("device", "host", "storage")

Reason = Literal[
    "never_seen",  # not that the tier remembers
    "evicted",  # made room for something else
    "dropped",  # it was not copied there: a queue or a share was full
    "timed_out",  # the tier had no answer in time
    "corrupted",  # it had, and the bytes were wrong
    "failed",  # a copy to it or from it failed
    "lost",  # the process that held it has ended
    "behind_gap",  # a page before it is missing, and a prefix ends there
    "other_namespace",  # another namespace of the same tenant has these tokens
    "below_threshold",  # too little to be worth a copy
    "slower",  # than to compute it again
    "not_admitted",  # the write policy wanted no copy there
    "storage_down",  # no storage can be used
    "not_asked",  # a tier above seemed to have it, or it was asked often enough
    "off",  # there is no such tier
    "stored",  # it has the page: for the memory of L3, which says itself what it has lost
]
HELD = frozenset(("evicted", "corrupted", "lost", "behind_gap", "stored"))  # the tier had the page


class Fate(NamedTuple):
    """What became of a page in a tier."""

    reason: Reason
    cause: str = ""  # for what, or which bound
    request_id: str = ""  # for whose sake
    seed: bytes = b""  # of that request's namespace: others aren't told its id
    at: float = 0.0  # s, the core's clock

    @property
    def held(self) -> bool:
        """Had the tier the page?"""
        return self.reason in HELD


NO_FATE = Fate("lost")  # nobody has said why
EVICTED = Fate("evicted")  # nobody has said for what


class Ghosts:
    """The last fate of each page in each tier. One of the tree's publishers."""

    def __init__(self, limit: int = MAX_GHOSTS) -> None:
        self.now = 0.0
        self._limit = limit
        self._tables: dict[Tier, dict[bytes, Fate]] = {tier: {} for tier in TIERS}
        self.current = NO_FATE  # what pages leave for now

    def because(self, fate: Fate) -> "Because":
        """What leaves the tree inside this block leaves it for that."""
        return Because(self, fate)

    def stored(self, node: Node, medium: Medium) -> None:
        """A page that is there needs no ghost, and its old one does no harm."""

    def removed(self, node: Node, medium: Medium, first: int = 0) -> None:
        """The tree has lost a node's pages from `first` on."""
        tier: Tier = "device" if medium == GPU else "host"
        self._put(tier, RadixTree.digests_of(node)[first:], self.current._replace(at=self.now))

    def note(self, tier: Tier, digests: Iterable[bytes], reason: Reason, cause: str = "") -> None:
        """The fate of pages that were in no node."""
        self._put(tier, digests, Fate(reason, cause, at=self.now))

    def left_storage(self, digests: Iterable[bytes]) -> None:
        """L3 has pages no more: its quota took them, unless a prefetch has just found them bad."""
        table = self._tables["storage"]
        gone = [digest for digest in digests if digest not in table or table[digest].reason != "corrupted"]
        self.note("storage", gone, "evicted", "by_storage")

    def fate(self, tier: Tier, digest: bytes) -> Fate | None:
        """What became of a page that the tier hasn't; None = nobody remembers."""
        return self._tables[tier].get(digest)

    def fates(self, digests: list[bytes]) -> list[tuple[Fate | None, Fate | None, Fate | None]]:
        """The fate of each page in each tier."""
        device, host, storage = (self._tables[tier].get for tier in TIERS)
        return [(device(digest), host(digest), storage(digest)) for digest in digests]

    def __len__(self) -> int:
        return sum(map(len, self._tables.values()))

    def _put(self, tier: Tier, digests: Iterable[bytes], fate: Fate) -> None:
        table = self._tables[tier]
        for digest in digests:
            table.pop(digest, None)  # the newest fate goes last
            table[digest] = fate
        while len(table) > self._limit:
            del table[next(iter(table))]


class Because:
    """The block of `Ghosts.because`. Each eviction enters it: a generator would take three times as long."""

    __slots__ = ("_before", "_fate", "_ghosts")

    def __init__(self, ghosts: Ghosts, fate: Fate) -> None:
        self._ghosts = ghosts
        self._fate = fate

    def __enter__(self) -> None:
        self._before = self._ghosts.current
        self._ghosts.current = self._fate

    def __exit__(self, *_: object) -> None:
        self._ghosts.current = self._before


class NoGhosts(Ghosts):
    """Remembers nothing: `explain` is off."""

    def _put(self, tier: Tier, digests: Iterable[bytes], fate: Fate) -> None:
        pass
