"""What the tree's nodes hold: locks, device pages, host spans, and the leaves that follow from them (TREE-06, TREE-08).

The tree hands ids back through what its methods return; it never talks to a pool.
"""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from services.scheduler.core.events import CPU, GPU, Medium
from services.scheduler.core.leaves import LeafHeap, Order, device_evictable
from services.scheduler.core.node import HostSpan, Node
from services.scheduler.core.pages import Pages, joined
from shared.errors import IntegrityError
from shared.page_hash import TOKEN_BYTES


class Lock:
    """A receipt: the path from `node` to its root stays, with its device pages, until `RadixTree.unlock`."""

    __slots__ = ("node",)

    def __init__(self, node: Node) -> None:
        self.node: Node | None = node  # None = released


class Publisher(Protocol):
    """Hears which tier has which pages, in the order in which it comes about (TIER-10)."""

    def stored(self, node: Node, medium: Medium) -> None:
        """The tier has the node's pages from now on."""

    def removed(self, node: Node, medium: Medium, first: int = 0) -> None:
        """It hasn't the node's pages from `first` on any more."""


class Detached(NamedTuple):
    """What a removal set free."""

    device: Pages
    host: list[HostSpan]


class TreeHolds:
    """All nodes of all namespaces, each with a root of its own, and their counts."""

    def __init__(self, page_size: int, device_order: Order, *publishers: Publisher) -> None:
        self.page_bytes = page_size * TOKEN_BYTES
        self.page_size = page_size
        self.roots: dict[bytes, Node] = {}  # by namespace seed
        self.locks: set[Lock] = set()
        self.detached: set[Node] = set()  # removed nodes whose device pages are still locked
        self.evictable = 0  # device pages under no lock
        self.protected = 0  # device pages under a lock
        self.device_leaves: LeafHeap[Node] = LeafHeap("device_entry", device_order, device_evictable)
        self._publishers = publishers  # are told what comes and goes
        self.clock = 0

    # --- locks --------------------------------------------------------------------------------------------------

    def lock(self, node: Node) -> Lock:
        """inc_lock_ref from `node` to its root (TREE-06)."""
        lock = Lock(node)
        self.locks.add(lock)
        step: Node | None = node
        while step is not None:
            if not step.lock_ref and step.value is not None:
                self.evictable -= step.pages
                self.protected += step.pages
            step.lock_ref += 1
            if step.parent is None:
                self.roots[step.seed] = step
            step = step.parent
        return lock

    def unlock(self, lock: Lock) -> Pages:
        """dec_lock_ref by receipt; returns device pages of detached nodes that nothing locks any more.

        Raises IntegrityError when the receipt was used before.
        """
        if lock.node is None:
            raise IntegrityError("a lock was released twice")
        step: Node | None = lock.node
        lock.node = None
        self.locks.discard(lock)
        freed: list[Pages] = []
        while step is not None:
            step.lock_ref -= 1
            if not step.lock_ref:
                self._unlocked(step, freed)
            step = step.parent
        return joined(freed)

    def _unlocked(self, node: Node, freed: list[Pages]) -> None:
        """The node's last lock is gone."""
        if node.value is not None:
            self.protected -= node.pages
            self.evictable += node.pages
            if node.detached:
                freed.append(self.drop_value(node))
                self.detached.discard(node)
        if node.detached:
            return
        if not node.valued_children:
            self.device_leaves.offer(node)
        self._offer_host(node)
        self._drop_empty_root(node)

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
        self._offer_host(node)  # a locked node's host copy can go now
        for publisher in self._publishers:
            publisher.stored(node, GPU)

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
        self._offer_host(node)
        if not node.detached:  # else it was told when the node left the tree
            self._removed(node, GPU)
        return pages

    def set_host(self, node: Node, span: HostSpan) -> None:
        """Make a node backed up."""
        node.host = span
        span.pool.cached += node.pages
        if node.parent is not None:
            node.parent.backed_children += 1
        self._offer_host(node)
        for publisher in self._publishers:
            publisher.stored(node, CPU)

    def drop_host(self, node: Node) -> HostSpan:
        """Take a node's host span away."""
        span, node.host = node.host, None
        if span is None:
            raise IntegrityError("a node without host pages was evicted from the host")
        span.pool.cached -= node.pages
        span.pool.leaves.discard(node)
        if node.parent is not None and not node.detached:
            node.parent.backed_children -= 1
            self._offer_host(node.parent)
        self._removed(node, CPU)
        return span

    def detach(self, node: Node) -> Detached:
        """Remove a node with its subtree. Locked device pages leave later, with their last lock."""
        parent = node.parent
        if parent is None or node.detached:
            raise IntegrityError("only a node in the tree can be removed")
        del parent.children[self.first_page(node.key)]
        device: list[Pages] = []
        host: list[HostSpan] = []
        parts = list(self.subtree(node)) if node.children else [node]
        for part in parts:
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
                self._removed(part, GPU)  # nobody finds it any more, and its pages may be loaded anew
        for part in parts:
            part.detached = True
        self.device_leaves.offer(parent)
        self._offer_host(parent)
        self._drop_empty_root(parent)
        return Detached(joined(device), host)

    # --- shape ----------------------------------------------------------------------------------------------------

    def first_page(self, key: bytes) -> bytes:
        """What a child is known by; the key itself if it is one page, so that its bytes aren't kept twice."""
        return key if len(key) == self.page_bytes else key[: self.page_bytes]

    def unlink(self, child: Node) -> None:
        """Take a node out of its parent's children; `link` must follow."""
        parent = child.parent
        if parent is None:
            raise IntegrityError("a root can't be unlinked")
        del parent.children[self.first_page(child.key)]
        parent.valued_children -= child.value is not None
        parent.backed_children -= child.host is not None

    def link(self, parent: Node, child: Node) -> None:
        """Put a node, with its subtree, below `parent`."""
        child.parent = parent
        parent.children[self.first_page(child.key)] = child
        parent.valued_children += child.value is not None
        parent.backed_children += child.host is not None
        if parent.is_root:
            self.roots[parent.seed] = parent

    def add_child(self, parent: Node, key: bytes, priority: int) -> Node:
        """A new node without pages; the caller gives it some at once."""
        node = Node(key, len(key) // self.page_bytes, parent, self.clock)
        node.priority = priority
        parent.children[self.first_page(key)] = node
        if parent.is_root:
            self.roots[parent.seed] = parent
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

    def _removed(self, node: Node, medium: Medium) -> None:
        for publisher in self._publishers:
            publisher.removed(node, medium)

    def _offer_host(self, node: Node) -> None:
        if node.host is not None and not node.backed_children:
            node.host.pool.leaves.offer(node)

    def _drop_empty_root(self, node: Node) -> None:
        if node.is_root and not node.children and not node.lock_ref:
            self.roots.pop(node.seed, None)
