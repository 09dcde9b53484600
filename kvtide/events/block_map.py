"""What a subscriber knows from KV events: each page's tiers, and the prefixes that pages form."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from shared.messages.events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent, Medium

TIERS: tuple[Medium, ...] = ("GPU", "CPU_PINNED", "DISK", "EXTERNAL")


@dataclass
class Block:
    """A page that some tier has."""

    parent: int | None
    tokens: list[int]
    tiers: set[Medium] = field(default_factory=set)


class Part(NamedTuple):
    """Consecutive pages of one prefix that lie in the same tiers."""

    depth: int  # branches above it
    start: int  # tokens before it
    tokens: list[int]  # its own
    pages: int
    tiers: tuple[Medium, ...]


class BlockMap:
    """Fed with every event in order."""

    def __init__(self) -> None:
        self._blocks: dict[int, Block] = {}
        self._children: dict[int | None, set[int]] = {}  # by parent's hash; a child's parent may be in no tier

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, name: int) -> bool:
        return name in self._blocks

    def apply(self, events: Iterable[KVCacheEvent]) -> None:
        """Take events in order."""
        for event in events:
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved(hashes, medium):
                    for name in hashes:
                        self._remove(name, medium)
                case AllBlocksCleared():
                    self._blocks.clear()
                    self._children.clear()

    def _store(self, event: BlockStored) -> None:
        parent, size = event.parent_block_hash, event.block_size
        for index, name in enumerate(event.block_hashes):
            block = self._blocks.get(name)
            if block is None:
                block = self._blocks[name] = Block(parent, event.token_ids[index * size : (index + 1) * size])
                self._children.setdefault(parent, set()).add(name)
            block.tiers.add(event.medium)
            parent = name

    def _remove(self, name: int, medium: Medium) -> None:
        block = self._blocks.get(name)
        if block is None:
            return
        block.tiers.discard(medium)
        if not block.tiers:
            del self._blocks[name]
            siblings = self._children[block.parent]
            siblings.discard(name)
            if not siblings:
                del self._children[block.parent]

    def pages(self) -> dict[Medium, int]:
        """How many pages each tier has."""
        return {tier: sum(tier in block.tiers for block in self._blocks.values()) for tier in TIERS}

    def parts(self) -> Iterator[Part]:
        """All prefixes from their first page on, each cut where it branches and where its tiers change."""
        tops = [parent for parent in self._children if parent is None or parent not in self._blocks]
        waiting = [(name, 0, 0) for parent in tops for name in sorted(self._children[parent])][::-1]
        while waiting:
            name, depth, start = waiting.pop()
            block = self._blocks[name]
            tokens, pages, tiers = list(block.tokens), 1, block.tiers
            children = self._children.get(name, set())
            while len(children) == 1:
                (child,) = children
                if self._blocks[child].tiers != tiers:
                    break
                tokens += self._blocks[child].tokens
                pages += 1
                children = self._children.get(child, set())
            yield Part(depth, start, tokens, pages, tuple(tier for tier in TIERS if tier in tiers))
            below = depth + (len(children) > 1)
            waiting += [(child, below, start + len(tokens)) for child in sorted(children, reverse=True)]
