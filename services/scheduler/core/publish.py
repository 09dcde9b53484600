"""KV events: which tier has which pages (TIER-10, EVENT-01)."""

from services.scheduler.core.events import BlockRemoved, BlockStored, CacheEvent, Medium
from services.scheduler.core.node import Node
from services.scheduler.core.tree import RadixTree


class CacheEvents:
    """What one `handle` has changed, in order. The tree's publisher, where somebody listens."""

    def __init__(self) -> None:
        self.list: list[CacheEvent] = []
        self._in_l3: dict[bytes, Medium] = {}  # digests that were published as stored there

    def stored(self, node: Node, medium: Medium) -> None:
        """The tier has the node's pages."""
        digests = RadixTree.digests_of(node)
        self.list.append(BlockStored(digests, parent_digest(node), node.key, medium))

    def removed(self, node: Node, medium: Medium, first: int = 0) -> None:
        """It hasn't the node's pages from `first` on any more."""
        self.list.append(BlockRemoved(RadixTree.digests_of(node)[first:], medium))

    def archived(self, blocks: list[BlockStored], positions: set[int]) -> None:
        """L3 has the pages of `blocks` at these positions, counted through all of them."""
        at = 0
        for digests, parent, tokens, medium in blocks:
            size = len(tokens) // len(digests)
            for index, digest in enumerate(digests):
                if at + index in positions and digest not in self._in_l3:
                    above = digests[index - 1] if index else parent
                    self.list.append(BlockStored([digest], above, tokens[size * index : size * (index + 1)], medium))
                    self._in_l3[digest] = medium
            at += len(digests)

    def dropped(self, digests: list[bytes]) -> None:
        """L3 has lost pages."""
        for digest in digests:
            medium = self._in_l3.pop(digest, None)  # a message may name a page twice, and pages that others stored
            if medium is not None:
                self.list.append(BlockRemoved([digest], medium))


def parent_digest(node: Node) -> bytes:
    """The digest of the page before the node's first, or the namespace's seed."""
    parent = node.parent
    if parent is None or parent.is_root:
        return parent.seed if parent is not None else b""
    return RadixTree.digests_of(parent)[-1]
