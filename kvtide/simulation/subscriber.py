"""A subscriber to the KV events: it replays them, and must come to know of each tier what the tree knows (TIER-10)."""

from typing import TYPE_CHECKING

from services.scheduler.core.events import CPU, GPU, BlockRemoved, BlockStored, CacheEvent, Medium

if TYPE_CHECKING:
    from kvtide.simulation.world import World
    from services.scheduler.core.core import Core

L3: tuple[Medium, ...] = ("DISK", "EXTERNAL")
SETTLED_S = 2.0  # after which a subscriber has heard of every page that L3 has dropped


class Subscriber:
    """Which digests each medium has, by what one scheduler has published."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._tiers: dict[Medium, set[bytes]] = {GPU: set(), CPU: set(), "DISK": set(), "EXTERNAL": set()}

    def take(self, events: list[CacheEvent]) -> None:
        """Replay. Nothing is stored twice, or removed where it isn't."""
        for event in events:
            tier, digests = self._tiers[event.medium], set(event.digests)
            match event:
                case BlockStored():
                    wrong = tier & digests
                    tier |= digests
                case BlockRemoved():
                    wrong = digests - tier
                    tier -= digests
            if wrong:
                self._world.fail(
                    f"{type(event).__name__} on {event.medium} of {len(wrong)} pages, not for the first time"
                )
        self._world.seen["events_replayed"] += len(events)

    def check(self, core: "Core") -> None:
        """What it knows is what the tree has, and L3."""
        tree = core.state.tree
        nodes = list(tree.nodes())
        held = {
            GPU: [node for node in nodes if node.value is not None],
            CPU: [node for node in nodes if node.host is not None],
        }
        for medium, having in held.items():
            digests = {digest for node in having for digest in tree.digests(node)}
            if digests != self._tiers[medium]:
                more, less = len(self._tiers[medium] - digests), len(digests - self._tiers[medium])
                self._world.fail(f"by its events {medium} has {more} pages that the tree hasn't, and lacks {less}")
        self._check_l3()

    def _check_l3(self) -> None:
        """It may not know of pages that others stored; of those that it was told of it must hear when they go."""
        first = self._world.first
        if first.clock.now < first.dropped_at + SETTLED_S or first.seen["kill_storage"]:  # a dead process tells nothing
            return
        if any(storage.dropped for world in first.worlds for storage in world.storages):  # one was paused: it will tell
            return
        there = {digest for store in first.l3.values() for digest in store}
        gone = [digest for medium in L3 for digest in self._tiers[medium] if digest not in there]
        if gone:
            self._world.fail(f"by its events L3 has {len(gone)} pages that are gone")
