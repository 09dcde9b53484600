"""Which prefixes are used most, and where each part of them lies: for the dashboard. Digests, never tokens."""

from collections.abc import Iterator
from heapq import nlargest
from itertools import groupby
from typing import Any, NamedTuple

from services.scheduler.core.ghosts import Ghosts
from services.scheduler.core.node import Node
from services.scheduler.core.tree import RadixTree

MAX_PREFIXES = 8  # as many as a person reads; the status is asked for every second
MAX_PARTS = 16  # of one prefix; what comes after them is left out
DIGEST_BYTES_SHOWN = 8  # of the last page's digest: enough to tell prefixes apart


class _Prefix(NamedTuple):
    """The path to a node."""

    saved: int  # tokens that its uses after the first didn't compute
    tokens: int
    end: Node


def top_prefixes(tree: RadixTree, ghosts: Ghosts) -> list[dict[str, Any]]:
    """The prefixes that saved most, uses times tokens. One that a longer one covers, saving more, isn't repeated."""
    covered: set[Node] = set()
    shown: list[dict[str, Any]] = []
    candidates = nlargest(4 * MAX_PREFIXES, _prefixes(tree), key=lambda prefix: prefix[:2])
    for prefix in candidates:
        if prefix.end in covered or len(shown) == MAX_PREFIXES:
            continue
        path = [node for node in tree.upward(prefix.end) if not node.is_root][::-1]
        covered.update(path)
        shown.append(
            {
                "digest": tree.digests(prefix.end)[-1][:DIGEST_BYTES_SHOWN].hex(),
                "tokens": prefix.tokens,
                "uses": prefix.end.hit_count,
                "parts": _parts(path, ghosts, tree),
            }
        )
    return shown


def _prefixes(tree: RadixTree) -> Iterator[_Prefix]:
    stack = [(child, 0) for root in tree.roots.values() for child in root.children.values()]
    while stack:
        node, before = stack.pop()
        tokens = before + node.pages * tree.page_size
        yield _Prefix(max(0, node.hit_count - 1) * tokens, tokens, node)
        stack.extend((child, tokens) for child in node.children.values())


def _parts(path: list[Node], ghosts: Ghosts, tree: RadixTree) -> list[dict[str, Any]]:
    parts = [
        {"tokens": sum(node.pages for node in nodes) * tree.page_size, "tiers": list(tiers)}
        for tiers, nodes in groupby(path, key=lambda node: _tiers(node, ghosts, tree))
    ]
    return parts[:MAX_PARTS]


def _tiers(node: Node, ghosts: Ghosts, tree: RadixTree) -> tuple[str, ...]:
    """The tiers that have the node; L3 as far as its own answers have told."""
    fates = [ghosts.fate("storage", digest) for digest in tree.digests(node)]
    stored = all(fate is not None and fate.reason == "stored" for fate in fates)
    has = {"device": node.value is not None, "host": node.host is not None, "storage": stored}
    return tuple(tier for tier, there in has.items() if there)
