"""Pins: prefixes that an administrator wants to stay, for a time (TTL). A pin is a lock without a request.

Ordinary pressure leaves pinned pages alone. They give way, oldest pin first, when the oldest request could not run
otherwise: it always gets on.
"""

from collections.abc import Callable
from dataclasses import dataclass

from services.scheduler.core.node import Node
from services.scheduler.core.pages import HostPool
from services.scheduler.core.state import State
from services.scheduler.core.tree_holds import Lock

PIN_SHARE = 0.25  # of the device pool that pins may hold without a budget: the rest is left for what changes
MAX_PINS = 1024  # each costs a walk up its path when the status is asked


@dataclass(eq=False)
class Pin:
    """One pinned prefix."""

    number: int  # its name
    lock: Lock
    pages: int
    until: float  # the core's clock


class Pins:
    """All of them."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._pins: dict[int, Pin] = {}  # in the order of their making
        self._made = 0
        self.page_bytes = 0  # of all ranks; 0 = not known yet

    @property
    def pages(self) -> int:
        """Of all pins; a page that two pins have in common counts twice."""
        return sum(pin.pages for pin in self._pins.values())

    def __len__(self) -> int:
        return len(self._pins)

    def locks(self) -> set[Lock]:
        """Those that are theirs."""
        return {pin.lock for pin in self._pins.values()}

    def locked(self) -> dict[Node, int]:
        """How many pins hold each node."""
        counts: dict[Node, int] = {}
        for pin in self._pins.values():
            for node in self._path(pin):
                counts[node] = counts.get(node, 0) + 1
        return counts

    def add(self, seed: bytes, tokens: bytes, ttl_s: float) -> tuple[int, int] | str:
        """Pin what device and host memory have of a prefix; returns its number and pages, or why not."""
        self._trim()
        page_bytes = self._state.tree.page_bytes
        match = self._state.tree.match_prefix(seed, tokens, len(tokens) // page_bytes)
        pages, (limit, bound) = match.device_pages + match.host_pages, self._limit()
        if not pages:
            return "no whole page of it is in device or host memory: send it as a prompt first"
        if self.pages + pages > limit:
            text = f"{self.pages} pages are pinned, {pages} more go beyond {limit}"
            return f"{text}, {bound}: unpin some"
        if len(self._pins) >= MAX_PINS:
            return f"there are {MAX_PINS} pins; unpin some"
        self._made += 1
        self._pins[self._made] = Pin(self._made, self._state.tree.lock(match.end), pages, self._state.now + ttl_s)
        return self._made, pages

    def _limit(self) -> tuple[int, str]:
        """Pages that all pins may hold, whichever tiers have them, and by which bound."""
        budget = self._state.settings.pin_bytes
        if budget and self.page_bytes:
            return budget // self.page_bytes, "cache.pin_bytes"
        return int(self._state.device.total * PIN_SHARE), "a quarter of the device pool"

    def remove(self, number: int) -> bool:
        """False when there is no such pin, or none any more."""
        pin = self._pins.pop(number, None)
        if pin is not None:
            self._state.unlock(pin.lock)
        return pin is not None

    def expire(self) -> None:
        """Those whose time is over end."""
        self._remove_if(lambda pin: pin.until <= self._state.now)
        self._trim()

    def next_deadline(self) -> float:
        """When the next one ends."""
        first = float("inf")
        for pin in self._pins.values():
            first = min(first, pin.until)
        return first

    def give_way(self) -> bool:
        """The oldest pin ends, for want of memory. False when there is none."""
        if not self._pins:
            return False
        self._state.counters["pins_gave_way"] += 1
        return self.remove(next(iter(self._pins)))

    def leave(self, pool: HostPool) -> None:
        """A pool is drained: pins that only its pages keep up end."""
        self._remove_if(lambda pin: any(_only_in(node, pool) for node in self._path(pin)))

    def _trim(self) -> None:
        """Let go of nodes that have left the tree: nobody finds their pages, and what was lost counts no more."""
        for pin in self._pins.values():
            path = self._path(pin)
            if path and path[0].detached:
                left = [node for node in path if not node.detached]
                old, end = pin.lock, left[0] if left else self._state.tree.top(path[0])
                pin.lock, pin.pages = self._state.tree.lock(end), sum(node.pages for node in left)
                self._state.unlock(old)

    def _path(self, pin: Pin) -> list[Node]:
        return [node for node in self._state.tree.upward(pin.lock.node) if not node.is_root] if pin.lock.node else []

    def _remove_if(self, condition: Callable[[Pin], bool]) -> None:
        for pin in [pin for pin in self._pins.values() if condition(pin)]:
            self.remove(pin.number)


def _only_in(node: Node, pool: HostPool) -> bool:
    return node.value is None and node.host is not None and node.host.pool is pool
