"""The radix tree: match, insert, split, lock (TREE-01..10).

    device part: leading nodes of a path with a value        (device-closed: a valued node's parent is valued)
    host part:   the nodes after them with a host span only

The tree hands ids back through what its methods return; it never talks to a pool.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from services.scheduler.core.leaves import LeafHeap, Order
from services.scheduler.core.node import HostSpan, Node
from services.scheduler.core.pages import NO_PAGES, Pages
from shared.errors import IntegrityError
from shared.page_hash import TOKEN_BYTES, chain


class Lock:
    """A receipt: the path from `node` to its root stays, with its device pages, until `RadixTree.unlock`."""

    __slots__ = ("node",)

    def __init__(self, node: Node) -> None:
        self.node: Node | None = node  # None = released


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


class Detached(NamedTuple):
    """What a removal set free."""

    device: Pages
    host: list[HostSpan]


def device_evictable(node: Node) -> bool:
    """An evictable leaf: a value, no lock, no child with a value (TREE-08)."""
    return node.value is not None and not node.lock_ref and not node.valued_children and not node.is_root


def host_evictable(node: Node) -> bool:
    """A host leaf whose loss leaves no locked node without pages (TIER-05)."""
    return node.host is not None and not node.backed_children and (node.value is not None or not node.lock_ref)


class RadixTree:
    """One radix tree over all namespaces, each with a root of its own."""

    def __init__(self, page_size: int, device_order: Order, host_order: Order) -> None:
        self.page_bytes = page_size * TOKEN_BYTES
        self.page_size = page_size
        self.roots: dict[bytes, Node] = {}  # by namespace seed
        self.locks: set[Lock] = set()
        self.detached: set[Node] = set()  # removed nodes whose device pages are still locked
        self.evictable = 0  # device pages under no lock
        self.protected = 0  # device pages under a lock
        self.device_leaves = LeafHeap("device_entry", device_order, device_evictable)
        self.host_leaves = LeafHeap("host_entry", host_order, host_evictable)
        self._clock = 0

    # --- match and insert ---------------------------------------------------------------------------------------

    def _root(self, seed: bytes) -> Node:
        """The namespace's root. A new one joins `roots` with its first lock or child."""
        root = self.roots.get(seed)
        if root is None:
            root = Node(b"", 0, None, self._clock)
            root.seed = seed
        return root

    def match_prefix(self, seed: bytes, tokens: bytes, pages: int, priority: int = 0) -> Match:
        """The longest cached prefix of the first `pages` pages of `tokens` (TREE-02). May split a node."""
        self._clock += 1
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
            node.priority = max(node.priority, priority)
            end = node
        return Match(device, host, end)

    def insert(self, seed: bytes, tokens: bytes, pages: Pages, owned_from: int, priority: int = 0) -> Inserted:
        """Put computed device pages into the tree (TREE-05). Pages before `owned_from` are the tree's own.

        An evicted node on the way takes the given pages and keeps its host copy. Where a node has other pages, the
        given ones are returned as duplicates.
        """
        self._clock += 1
        end = self._root(seed)
        path: list[Node] = []
        duplicates: list[Pages] = []
        at = present = 0
        for node in self._walk(end, tokens, len(pages) * self.page_bytes):
            given = pages[at : at + node.pages]
            if node.value is None:
                self.set_value(node, given)
            else:
                present = at + node.pages
                if at >= owned_from:
                    duplicates.append(given)
            at += node.pages
            node.priority = max(node.priority, priority)
            path.append(node)
            end = node
        if at < len(pages):
            node = self._add_child(end, tokens[at * self.page_bytes : len(pages) * self.page_bytes], priority)
            self.set_value(node, pages[at:])
            path.append(node)
        return Inserted(path, np.concatenate(duplicates) if duplicates else NO_PAGES, present)

    def insert_host(self, seed: bytes, tokens: bytes, first: int, span: HostSpan) -> list[HostSpan]:
        """Put named host pages for pages `first`.. of `tokens` into the tree; returns those it did not take.

        The path to `first` must be there (the caller holds a lock on it).
        """
        self._clock += 1
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
            node = self._add_child(end, tokens[at * self.page_bytes : total * self.page_bytes], 0)
            self.set_host(node, HostSpan(span.pool, span.pages[at - first :]))
        return refused

    def _walk(self, node: Node, tokens: bytes, limit: int) -> Iterator[Node]:
        """Nodes along `tokens[:limit]`; the last one is split where the key leaves it."""
        at = 0
        while at < limit:
            child = node.children.get(tokens[at : at + self.page_bytes])
            if child is None:
                return
            size = len(child.key)
            if size > limit - at or (size > self.page_bytes and tokens[at : at + size] != child.key):
                child = self._split(child, self._common_pages(child.key, tokens[at : min(at + size, limit)]))
            child.last_access = self._clock
            yield child
            at += len(child.key)
            node = child

    def _common_pages(self, key: bytes, tokens: bytes) -> int:
        size = min(len(key), len(tokens)) // TOKEN_BYTES
        differ = np.frombuffer(key, np.int32, size) != np.frombuffer(tokens, np.int32, size)
        common = int(differ.argmax()) if differ.any() else size
        return common * TOKEN_BYTES // self.page_bytes

    def _add_child(self, parent: Node, key: bytes, priority: int) -> Node:
        node = Node(key, len(key) // self.page_bytes, parent, self._clock)
        node.priority = priority
        parent.children[key[: self.page_bytes]] = node
        if parent.is_root:
            self.roots[parent.seed] = parent
        return node

    def _split(self, node: Node, pages: int) -> Node:
        """Cut `node` after `pages` pages; the new upper part is returned, `node` stays the lower one (TREE-03)."""
        if not 0 < pages < node.pages or node.parent is None:
            raise IntegrityError(f"can't split a node of {node.pages} pages at {pages}")
        cut = pages * self.page_bytes
        upper = Node(node.key[:cut], pages, node.parent, node.created)
        for name in ("lock_ref", "hit_count", "last_access", "priority", "writing", "loading"):
            setattr(upper, name, getattr(node, name))
        node.parent.children[node.key[: self.page_bytes]] = upper
        node.key, node.pages, node.parent = node.key[cut:], node.pages - pages, upper
        upper.children[node.key[: self.page_bytes]] = node
        if node.value is not None:
            upper.value, node.value = node.value[:pages], node.value[pages:]
            upper.valued_children = 1
        if node.host is not None:
            pool, ids = node.host
            upper.host, node.host = HostSpan(pool, ids[:pages]), HostSpan(pool, ids[pages:])
            upper.backed_children = 1
        if node.digests is not None:
            upper.digests, node.digests = node.digests[:pages], node.digests[pages:]
        return upper

    # --- locks --------------------------------------------------------------------------------------------------

    def lock(self, node: Node) -> Lock:
        """inc_lock_ref from `node` to its root (TREE-06)."""
        lock = Lock(node)
        self.locks.add(lock)
        for step in self.upward(node):
            if not step.lock_ref and step.value is not None:
                self.evictable -= step.pages
                self.protected += step.pages
            step.lock_ref += 1
            if step.is_root:
                self.roots[step.seed] = step
        return lock

    def unlock(self, lock: Lock) -> Pages:
        """dec_lock_ref by receipt; returns device pages of detached nodes that nothing locks any more.

        Raises IntegrityError when the receipt was used before.
        """
        if lock.node is None:
            raise IntegrityError("a lock was released twice")
        node, lock.node = lock.node, None
        self.locks.discard(lock)
        freed: list[Pages] = []
        for step in self.upward(node):
            step.lock_ref -= 1
            if step.lock_ref:
                continue
            if step.value is not None:
                self.protected -= step.pages
                self.evictable += step.pages
                if step.detached:
                    freed.append(self.drop_value(step))
                    self.detached.discard(step)
            if not step.detached:
                self.device_leaves.offer(step)
                self.host_leaves.offer(step)
                self._drop_empty_root(step)
        return np.concatenate(freed) if freed else NO_PAGES

    def upward(self, node: Node) -> Iterator[Node]:
        """The node and its ancestors, the root last."""
        step: Node | None = node
        while step is not None:
            yield step
            step = step.parent

    def top(self, node: Node) -> Node:
        """The root of the node's namespace."""
        while node.parent is not None:
            node = node.parent
        return node

    def covered(self, lock: Lock, pages: int) -> list[Node]:
        """The nodes, ancestors first, that hold the last `pages` pages of a locked path, splits included."""
        nodes: list[Node] = []
        for step in self.upward(lock.node) if lock.node is not None else ():
            if pages <= 0:
                break
            nodes.append(step)
            pages -= step.pages
        if pages:
            raise IntegrityError(f"a lock covers {-pages} pages more or less than its operation")
        return nodes[::-1]

    # --- values and spans ---------------------------------------------------------------------------------------

    def set_value(self, node: Node, pages: Pages) -> None:
        """Give an evicted node device pages."""
        node.value = pages
        if node.lock_ref:
            self.protected += node.pages
        else:
            self.evictable += node.pages
        if node.parent is not None:
            node.parent.valued_children += 1
        self.device_leaves.offer(node)
        self.host_leaves.offer(node)  # a locked node's host copy can go now

    def drop_value(self, node: Node) -> Pages:
        """Take a node's device pages away; its parent may become a leaf."""
        pages, node.value = node.value, None
        if pages is None:
            raise IntegrityError("a node without device pages was evicted")
        if node.lock_ref:
            self.protected -= node.pages
        else:
            self.evictable -= node.pages
        self.device_leaves.discard(node)
        if node.parent is not None and not node.detached:
            node.parent.valued_children -= 1
            self.device_leaves.offer(node.parent)
        self.host_leaves.offer(node)
        return pages

    def set_host(self, node: Node, span: HostSpan) -> None:
        """Make a node backed up."""
        node.host = span
        if node.parent is not None:
            node.parent.backed_children += 1
        self.host_leaves.offer(node)

    def drop_host(self, node: Node) -> HostSpan:
        """Take a node's host span away."""
        span, node.host = node.host, None
        if span is None:
            raise IntegrityError("a node without host pages was evicted from the host")
        self.host_leaves.discard(node)
        if node.parent is not None and not node.detached:
            node.parent.backed_children -= 1
            self.host_leaves.offer(node.parent)
        return span

    def detach(self, node: Node) -> Detached:
        """Remove a node with its subtree. Locked device pages leave later, with their last lock."""
        parent = node.parent
        if parent is None or node.detached:
            raise IntegrityError("only a node in the tree can be removed")
        del parent.children[node.key[: self.page_bytes]]
        device: list[Pages] = []
        host: list[HostSpan] = []
        for part in list(self.subtree(node)):
            if part.host is not None:
                host.append(self.drop_host(part))
            if part.value is not None and not part.lock_ref:
                device.append(self.drop_value(part))
            elif part.value is not None:
                parent_of_part = part.parent
                if parent_of_part is not None:
                    parent_of_part.valued_children -= 1
                self.device_leaves.discard(part)
                self.detached.add(part)
        for part in self.subtree(node):
            part.detached = True
        self.device_leaves.offer(parent)
        self.host_leaves.offer(parent)
        self._drop_empty_root(parent)
        return Detached(np.concatenate(device) if device else NO_PAGES, host)

    def unlink(self, child: Node) -> None:
        """Take a node out of its parent's children; `link` must follow."""
        parent = child.parent
        if parent is None:
            raise IntegrityError("a root can't be unlinked")
        del parent.children[child.key[: self.page_bytes]]
        parent.valued_children -= child.value is not None
        parent.backed_children -= child.host is not None

    def link(self, parent: Node, child: Node) -> None:
        """Put a node, with its subtree, below `parent`."""
        child.parent = parent
        parent.children[child.key[: self.page_bytes]] = child
        parent.valued_children += child.value is not None
        parent.backed_children += child.host is not None
        if parent.is_root:
            self.roots[parent.seed] = parent

    def graft(self, parent: Node, key: bytes, span: HostSpan) -> Node:
        """A new node below `parent` that host memory alone has."""
        node = self._add_child(parent, key, 0)
        self.set_host(node, span)
        return node

    def subtree(self, node: Node) -> Iterator[Node]:
        """The node and everything below it, parents first."""
        stack = [node]
        while stack:
            part = stack.pop()
            yield part
            stack.extend(part.children.values())

    def nodes(self) -> Iterator[Node]:
        """Every node in the tree, roots included."""
        for root in self.roots.values():
            yield from self.subtree(root)

    def digests(self, node: Node) -> list[bytes]:
        """The digests of a node's pages, computed when first needed."""
        missing = []
        step = node
        while step.digests is None and not step.is_root and step.parent is not None:
            missing.append(step)
            step = step.parent
        last = step.seed if step.is_root else (step.digests or [b""])[-1]
        for part in reversed(missing):
            part.digests = list(chain(last, part.key, self.page_size))
            last = part.digests[-1]
        return node.digests or []

    def _drop_empty_root(self, node: Node) -> None:
        if node.is_root and not node.children and not node.lock_ref:
            self.roots.pop(node.seed, None)
