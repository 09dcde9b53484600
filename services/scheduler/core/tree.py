"""The radix tree: match, insert, split (TREE-01..05).

device part: leading nodes of a path with a value        (device-closed: a valued node's parent is valued)
host part:   the nodes after them with a host span only
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from services.scheduler.core.events import GPU
from services.scheduler.core.node import HostSpan, Node
from services.scheduler.core.pages import Pages, joined
from services.scheduler.core.tree_holds import Detached, TreeHolds
from shared.errors import IntegrityError
from shared.page_hash import TOKEN_BYTES, chain


class Match(NamedTuple):
    """The path that a key shares with the tree, whole pages only."""

    device: list[Node]  # leading nodes with device pages
    host: list[Node]  # nodes after them with host pages only
    end: Node  # last node of the path, the root if it is empty

    @property
    def device_pages(self) -> int:
        """Pages on the device, those still being loaded included."""
        return sum(node.pages for node in self.device)

    @property
    def host_pages(self) -> int:
        """Pages after them that only host memory has."""
        return sum(node.pages for node in self.host)


class Inserted(NamedTuple):
    """What an insert did."""

    path: list[Node]  # nodes that now cover the key
    duplicates: Pages  # given pages that the tree did not take: the caller frees them
    present: int  # leading pages that had a value already


class RadixTree(TreeHolds):
    """One radix tree over all namespaces."""

    def match_prefix(self, seed: bytes, tokens: bytes, pages: int, priority: int = 0) -> Match:
        """The longest cached prefix of the first `pages` pages of `tokens` (TREE-02). May split a node."""
        self.clock += 1
        device: list[Node] = []
        host: list[Node] = []
        end = self._root(seed)
        for node in self._walk(end, tokens, pages * self.page_bytes):
            if node.value is not None:
                device.append(node)
            elif node.host is not None and node.host.pool.usable:
                host.append(node)
            else:
                break
            if priority > node.priority:
                node.priority = priority
            end = node
        return Match(device, host, end)

    def insert(self, seed: bytes, tokens: bytes, pages: Pages, owned_from: int, priority: int = 0) -> Inserted:
        """Put computed device pages into the tree (TREE-05). Pages before `owned_from` are the tree's own.

        An evicted node on the way takes the given pages and keeps its host copy. Where a node has other pages, the
        given ones are returned as duplicates.
        """
        self.clock += 1
        end = self._root(seed)
        path = self._walk(end, tokens, len(pages) * self.page_bytes)
        duplicates: list[Pages] = []
        at = present = 0
        for node in path:
            first, at = at, at + node.pages
            if node.value is None:
                self.set_value(node, pages[first:at].copy())
            else:
                present = at
                if first >= owned_from:
                    duplicates.append(pages[first:at])
            if priority > node.priority:
                node.priority = priority
            end = node
        if at < len(pages):
            node = self.add_child(end, tokens[at * self.page_bytes : len(pages) * self.page_bytes], priority)
            self.set_value(node, pages[at:].copy())  # a view would keep the caller's whole page table alive
            path.append(node)
        return Inserted(path, joined(duplicates), present)

    def insert_host(self, seed: bytes, tokens: bytes, first: int, span: HostSpan) -> list[HostSpan]:
        """Put named host pages for pages `first`.. of `tokens` into the tree; returns those it did not take.

        The path to `first` must be there (the caller holds a lock on it).
        """
        self.clock += 1
        end = self._root(seed)
        total = first + len(span.pages)
        refused: list[HostSpan] = []
        at = 0
        for node in self._walk(end, tokens, total * self.page_bytes):
            end = node
            given = HostSpan(span.pool, span.pages[max(0, at - first) : max(0, at + node.pages - first)])
            if len(given.pages):
                if node.host is None and node.writing is None and len(given.pages) == node.pages:
                    self.set_host(node, given)
                else:
                    refused.append(given)
            at += node.pages
        if at < first:
            raise IntegrityError(f"the path to page {first} ends at {at}, though it was locked")
        if at < total:
            node = self.add_child(end, tokens[at * self.page_bytes : total * self.page_bytes], 0)
            self.set_host(node, HostSpan(span.pool, span.pages[at - first :]))
        return refused

    def _walk(self, node: Node, tokens: bytes, limit: int) -> list[Node]:
        """Nodes along `tokens[:limit]`; the last one is split where the key leaves it."""
        path: list[Node] = []
        clock, page_bytes, at = self.clock, self.page_bytes, 0
        while at < limit:
            child = node.children.get(tokens[at : at + page_bytes])
            if child is None:
                break
            key = child.key
            end = at + len(key)
            if end > limit or not tokens.startswith(key, at):  # compares in place, without a copy
                child = self._split(child, self._common_pages(key, tokens[at : min(end, limit)]))
                end = limit  # the key leaves the tree here
            child.last_access = clock
            path.append(child)
            at, node = end, child
        return path

    def peek(self, node: Node, tokens: bytes, pages: int) -> Iterator[tuple[Node, int]]:
        """The nodes below `node` along `tokens` and how many of their pages agree. Splits nothing, touches nothing."""
        at, limit = 0, pages * self.page_bytes
        while at < limit:
            child = node.children.get(tokens[at : at + self.page_bytes])
            if child is None:
                return
            common = self._common_pages(child.key, tokens[at : min(at + len(child.key), limit)])
            yield child, common
            if common < child.pages:
                return
            at += len(child.key)
            node = child

    def _common_pages(self, key: bytes, tokens: bytes) -> int:
        size = min(len(key), len(tokens)) // TOKEN_BYTES
        differ = np.frombuffer(key, np.int32, size) != np.frombuffer(tokens, np.int32, size)
        first = differ.tobytes().find(1)
        common = size if first < 0 else first
        return common * TOKEN_BYTES // self.page_bytes

    def _split(self, node: Node, pages: int) -> Node:
        """Cut `node` after `pages` pages; the new upper part is returned, `node` stays the lower one (TREE-03)."""
        if not 0 < pages < node.pages or node.parent is None:
            raise IntegrityError(f"can't split a node of {node.pages} pages at {pages}")
        cut = pages * self.page_bytes
        upper = Node(node.key[:cut], pages, node.parent, node.created)
        for name in ("lock_ref", "hit_count", "last_access", "priority", "writing", "loading", "shed", "unwritable"):
            setattr(upper, name, getattr(node, name))
        node.parent.children[self.first_page(node.key)] = upper
        node.key, node.pages, node.parent = node.key[cut:], node.pages - pages, upper
        upper.children[self.first_page(node.key)] = node
        if node.value is not None:
            upper.value, node.value = node.value[:pages], node.value[pages:]
            upper.valued_children = 1
        if node.host is not None:
            pool, ids = node.host
            upper.host, node.host = HostSpan(pool, ids[:pages]), HostSpan(pool, ids[pages:])
            upper.backed_children = 1
        if node.digests is not None:
            upper.digests, node.digests = node.digests[:pages], node.digests[pages:]
        upper.frequencies, node.frequencies = node.frequencies[:pages], node.frequencies[pages:]
        return upper

    def cut(self, node: Node, pages: int) -> None:
        """Make `node` its own last `pages` pages, if it has more: what is before them stays a node of its own."""
        if node.pages > pages:
            self._split(node, node.pages - pages)

    def evict_end(self, node: Node, count: int) -> Detached:
        """Remove the last `count` pages of an evictable leaf without a host copy, or all of it (TIER-04).

        A leaf has no subtree as a rule, and is then dealt with here in one go: evictions are many.
        """
        parent, value = node.parent, node.value
        if parent is None or value is None or node.lock_ref:
            raise IntegrityError("only an evictable leaf is evicted")
        if node.children or node.host is not None:
            self.cut(node, count)
            return self.detach(node)
        keep = max(0, node.pages - count)
        self.evictable -= node.pages - keep
        for publisher in self._publishers:
            publisher.removed(node, GPU, keep)
        if keep:
            node.key, node.pages, node.value = node.key[: keep * self.page_bytes], keep, value[:keep]
            node.digests = node.digests[:keep] if node.digests is not None else None
            node.frequencies = node.frequencies[:keep]
            self.device_leaves.discard(node)
            self.device_leaves.offer(node)
            return Detached(value[keep:], [])
        del parent.children[self.first_page(node.key)]
        node.value, node.detached = None, True
        self.device_leaves.discard(node)
        parent.valued_children -= 1
        if parent.parent is None:
            self._drop_empty_root(parent)
        elif not parent.valued_children:
            self.device_leaves.offer(parent)
        return Detached(value, [])

    def graft(self, parent: Node, key: bytes, span: HostSpan) -> Node:
        """A new node below `parent` that host memory alone has."""
        node = self.add_child(parent, key, 0)
        self.set_host(node, span)
        return node

    @staticmethod
    def digests_of(node: Node) -> list[bytes]:
        """The digests of a node's pages, computed when first needed."""
        missing = []
        step = node
        while step.digests is None and not step.is_root and step.parent is not None:
            missing.append(step)
            step = step.parent
        last = step.seed if step.is_root else (step.digests or [b""])[-1]
        for part in reversed(missing):
            part.digests = list(chain(last, part.key, len(part.key) // TOKEN_BYTES // part.pages))
            last = part.digests[-1]
        return node.digests or []

    def digests(self, node: Node) -> list[bytes]:
        """See `digests_of`."""
        return node.digests if node.digests is not None else self.digests_of(node)

    def _root(self, seed: bytes) -> Node:
        """The namespace's root. A new one joins `roots` with its first lock or child."""
        root = self.roots.get(seed)
        if root is None:
            root = Node(b"", 0, None, self.clock)
            root.seed = seed
        return root
