"""Eviction strategies by name (TREE-09): what leaves first among the evictable leaves of a tier.

A strategy gives a leaf a key, and the smallest key goes. `auto` has no key of its own: see `reuse.py`.
"""

from services.scheduler.core.leaves import Key, Order
from services.scheduler.core.node import Node

PROTECTED_HITS = 2  # slru: a node that was used again is protected (Karedla et al., 1994)


def _lru(node: Node) -> Key:
    return (0, node.last_access)


def _lfu(node: Node) -> Key:
    return (node.hit_count, node.last_access)


def _fifo(node: Node) -> Key:
    return (0, node.created)


def _mru(node: Node) -> Key:
    return (0, -node.last_access)


def _filo(node: Node) -> Key:
    return (0, -node.created)


def _priority(node: Node) -> Key:
    return (node.priority, node.last_access)


def _slru(node: Node) -> Key:
    return (int(node.hit_count >= PROTECTED_HITS), node.last_access)


ORDERS: dict[str, Order] = {
    "lru": _lru,
    "lfu": _lfu,
    "fifo": _fifo,
    "mru": _mru,
    "filo": _filo,
    "priority": _priority,
    "slru": _slru,
}
