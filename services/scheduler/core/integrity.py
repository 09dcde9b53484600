"""check_integrity: every page in exactly one place, every count right (TREE-10).

It is written for speed, as the simulation calls it after every event: one walk over the tree, one count of each pool's
ids. Who breaks an invariant is looked for only when one is broken.
"""

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from services.scheduler.core.events import CPU, GPU
from services.scheduler.core.leaves import LeafHeap
from services.scheduler.core.node import HostSpan, Node
from services.scheduler.core.operations import Find, Operation, Prefetch, Release, Step
from services.scheduler.core.pages import HostPool, PagePool, Pages, joined
from services.scheduler.core.request import Request, RequestState
from services.scheduler.core.tree import RadixTree
from services.scheduler.core.tree_holds import Lock
from shared.errors import IntegrityError

if TYPE_CHECKING:
    from services.scheduler.core.core import Core


class Claims:
    """Who holds which pages of a pool, and how many nodes have an entry among its evictable leaves."""

    def __init__(self) -> None:
        self.entries = self.share_entries = 0
        self.owners: list[object] = []  # a node, a request, an operation, or the name of a list
        self.pages: list[Pages] = []  # of each

    def add(self, owner: object, pages: Pages) -> None:
        """One more."""
        self.owners.append(owner)
        self.pages.append(pages)


def check_integrity(core: "Core") -> None:
    """Raises IntegrityError naming the page, node or lock that breaks an invariant. O(everything)."""
    tree, device, requests = core.state.tree, core.state.device, core.requests
    operations = list(core.state.operations.table.values())
    on_device = [*requests.running, *requests.draining]
    in_tree = _Walk(tree, core.state.holdings is not None)
    if not device.dead:
        claims = in_tree.device
        claims.add("the free list", device.free_pages())
        for request in on_device:
            claims.add(request, request.own_pages)
        for operation in operations:
            if isinstance(operation, Step):
                for held in operation.held:
                    claims.add(operation, held.pages)
        _check_pool("device", device, claims, tree.device_leaves)
    for pool in core.host.pools.values():
        claims = in_tree.host.pop(pool) if pool in in_tree.host else Claims()
        _check_host_pool(core, pool, claims, [each for each in operations if each.pool is pool])
    for pool, claims in in_tree.host.items():
        raise IntegrityError(f"{_name(claims.owners[0])} has pages in a pool of {pool.storage_id} that is gone")
    if core.state.holdings is not None:
        counted = core.state.holdings.pages
        if (dict(counted[GPU]), dict(counted[CPU])) != (in_tree.device_of, in_tree.host_of):
            raise IntegrityError("the pages of a namespace are counted wrongly")
    _check_owners(core, operations)
    _check_requests(core, on_device, operations)


def _check_pool(name: str, pool: PagePool, claims: Claims, leaves: LeafHeap[Node]) -> None:
    """Each of the pool's ids is claimed once, and its evictable leaves are those that say so."""
    entries, carried = leaves.entries(), (claims.entries, claims.share_entries)
    if entries != carried:
        raise IntegrityError(f"{name}: {entries} entries of evictable leaves, in all and by namespace; nodes {carried}")
    held: list[int] = []
    for pages in claims.pages:
        held += pages.tolist()
    first = pool.end - pool.total
    if len(held) == pool.total and set(held) == _ids(first, pool.end):
        return
    owner: dict[int, object] = {}
    for who, pages in zip(claims.owners, claims.pages, strict=True):
        for page in pages.tolist():
            if page in owner:
                raise IntegrityError(f"{name} page {page} is held by {_name(owner[page])} and by {_name(who)}")
            owner[page] = who
    missing = sorted(set(range(first, pool.end)) - set(owner))
    raise IntegrityError(f"{name} pages {missing[:8]} of {pool.total} are held by nobody")


@lru_cache(maxsize=16)
def _ids(first: int, end: int) -> frozenset[int]:
    return frozenset(range(first, end))


def _check_host_pool(core: "Core", pool: HostPool, claims: Claims, operations: list[Operation]) -> None:
    """Its ids, and its counts: cached, releasing, prefetching, pins."""
    name = f"host {pool.storage_id}"
    cached = sum([len(pages) for pages in claims.pages])
    queued = core.host.queued(pool)
    claims.add("the free list", pool.free_pages())
    if queued:
        claims.add("the release queue", core.host.queued_pages(pool))
    if pool.orphans:
        claims.add("the orphans", pool.orphaned)
    if core.host.doomed.get(pool):
        claims.add("the doomed", core.host.doomed_pages(pool))
    releasing, prefetching, pinned = queued, 0, []
    for operation in operations:
        held = operation.held_host_pages
        if len(held):
            claims.add(operation, held)
            releasing += len(held) if isinstance(operation, Release) else 0
            prefetching += len(held) if isinstance(operation, Prefetch) else 0
        elif len(read := operation.pinned_host_pages):
            pinned.append(read)
    for request in core.requests.all.values():
        if request.reserved is not None and request.reserved.pool is pool:
            prefetching += request.reserved.pages
    _check_pool(name, pool, claims, pool.leaves)
    counts, are = (pool.cached, pool.releasing, pool.prefetching), (cached, releasing, prefetching)
    if counts != are:
        raise IntegrityError(f"{counts} pages of {name} count as cached, releasing and prefetching, {are} are")
    counted = pool.pins.tobytes()  # bytes are compared in a third of the time that a ufunc takes
    if pinned or counted != bytes(len(counted)):
        pins = np.bincount(joined(pinned), minlength=pool.end).astype(np.int32)
        if pins.tobytes() != counted:
            page = int(np.argmax(pins != pool.pins))
            raise IntegrityError(f"host page {page} has {pool.pins[page]} pins, {pins[page]} operations read it")


def _lock_counts(tree: RadixTree) -> dict[Node, int]:
    """How many locks hold each node."""
    counts: dict[Node, int] = {}
    for lock in tree.locks:
        node = lock.node
        if node is None:
            raise IntegrityError("a released lock is still counted")
        while node is not None:
            counts[node] = counts.get(node, 0) + 1
            node = node.parent
    return counts


class _Walk:
    """Checks every node's own invariants, and gathers what nodes hold on the device and in each host pool."""

    def __init__(self, tree: RadixTree, shared: bool) -> None:
        """shared: leaves have an entry among those of their namespace, too."""
        self.device = Claims()
        self.host: dict[HostPool, Claims] = {}
        self.device_of: dict[bytes, int] = {}  # pages by namespace
        self.host_of: dict[bytes, int] = {}
        self._evictable = self._protected = 0
        self._locks = _lock_counts(tree)
        self._leaves = tree.device_leaves
        self._shared = shared
        for seed, root in tree.roots.items():
            self._namespace(tree, seed, root)
        for node in tree.detached:
            if node.lock_ref and node not in self._locks:
                _wrong_locks(tree, node)
            if node.value is not None:
                self._on_device(node, node.value)
        for node, count in self._locks.items():  # nodes outside the tree, too
            if node.lock_ref != count:
                _wrong_locks(tree, node)
        if (self._evictable, self._protected) != (tree.evictable, tree.protected):
            counted = f"{tree.evictable} pages count as evictable and {tree.protected} as protected"
            raise IntegrityError(f"{counted}, {self._evictable} and {self._protected} are")

    def _namespace(self, tree: RadixTree, seed: bytes, root: Node) -> None:
        in_device = in_host = 0
        stack = [root]
        while stack:
            node = stack.pop()
            value, span, pages = node.value, node.host, node.pages
            if node.lock_ref and node not in self._locks:
                _wrong_locks(tree, node)
            valued = backed = 0
            if node.children:
                for child in node.children.values():
                    valued += child.value is not None
                    backed += child.host is not None
                    stack.append(child)
            if valued != node.valued_children or backed != node.backed_children:
                raise IntegrityError(f"{_name(node)} counts its children wrongly")
            entry, share_entry = node.device_entry is not None, node.device_share_entry is not None
            self.device.entries += entry
            self.device.share_entries += share_entry
            seen = entry and share_entry is self._shared
            if value is not None:
                in_device += pages
                self._on_device(node, value)
                if len(value) != pages:
                    raise IntegrityError(f"{_name(node)} covers {pages} pages and holds {len(value)}")
                if not seen and not node.lock_ref and not valued and not self._leaves.sees(node):
                    raise IntegrityError(f"{_name(node)} is a device leaf that eviction can't see")
            elif valued and not node.is_root:
                raise IntegrityError(f"a child of a {_name(node)} is on the device, its parent isn't")
            if span is not None:
                in_host += pages
                self._in_host(node, span, leaf=not backed and (value is not None or not node.lock_ref))
            elif value is None and not node.is_root:
                raise IntegrityError(f"{_name(node)} has pages nowhere")
        if in_device:
            self.device_of[seed] = in_device
        if in_host:
            self.host_of[seed] = in_host

    def _on_device(self, node: Node, value: Pages) -> None:
        self.device.add(node, value)
        if node.lock_ref:
            self._protected += node.pages
        else:
            self._evictable += node.pages

    def _in_host(self, node: Node, span: HostSpan, *, leaf: bool) -> None:
        pool = span.pool
        if pool not in self.host:
            self.host[pool] = Claims()
        claims = self.host[pool]
        claims.add(node, span.pages)
        entry, share_entry = node.host_entry is not None, node.host_share_entry is not None
        claims.entries += entry
        claims.share_entries += share_entry
        if len(span.pages) != node.pages:
            raise IntegrityError(f"{_name(node)} covers {node.pages} pages and holds {len(span.pages)} host pages")
        if leaf and not (entry and share_entry is self._shared) and not pool.leaves.sees(node):
            raise IntegrityError(f"{_name(node)} is a host leaf that eviction can't see")


def _wrong_locks(tree: RadixTree, node: Node) -> None:
    counts = Counter(step for lock in tree.locks if lock.node is not None for step in tree.upward(lock.node))
    raise IntegrityError(f"{_name(node)} has lock_ref {node.lock_ref}, {counts[node]} locks hold it")


def _check_owners(core: "Core", operations: Iterable[Operation]) -> None:
    """Each lock belongs to a request or an operation."""
    held: set[Lock] = set()
    for requests in (core.requests.running, core.requests.draining, core.requests.all.values()):
        for request in requests:
            if request.lock is not None:
                held.add(request.lock)
            if request.reserved is not None:
                held.add(request.reserved.lock)
    for operation in (*operations, *core.prefetcher.hungry()):
        if operation.lock is not None:
            held.add(operation.lock)
        if isinstance(operation, Step) and operation.held:
            held.update(operation.locks)
    held.update(core.admin.pins.locks())
    locks = core.state.tree.locks
    if held != locks:
        raise IntegrityError(f"{len(locks - held)} locks belong to nobody, {len(held - locks)} are unknown")


def _check_requests(core: "Core", on_device: list[Request], operations: list[Operation]) -> None:
    rows = [request.row for request in on_device]
    if not core.state.device.dead and len({*rows, *core.requests.rows}) != len(rows) + len(core.requests.rows):
        raise IntegrityError(f"a row is used twice: {rows} are taken, {core.requests.rows} are free")
    for request in core.requests.all.values():
        if (request.fetch is not None) != (request.state in (RequestState.LOOKUP, RequestState.PREFETCHING)):
            raise IntegrityError(f"{request!r} waits for {type(request.fetch).__name__}")
    for request in core.requests.running:
        shared = request.shared * core.state.settings.page_size
        ahead = max(0, request.in_flight - 1)  # steps that take the token of the step before
        if not shared <= request.computed <= request.scheduled <= request.length + ahead:
            raise IntegrityError(f"{request!r} counts {shared}, {request.computed}, {request.scheduled}")
    for operation in operations:
        if isinstance(operation, (Find, Prefetch)) and operation.failed and operation.requests:
            raise IntegrityError(f"requests wait for operation {operation.op_id}, which has failed")


def _name(who: object) -> str:
    match who:
        case Node():
            return f"node of {who.pages} pages{' (root)' if who.is_root else ''}{' (removed)' if who.detached else ''}"
        case Operation():
            return f"{type(who).__name__} {who.op_id}"
    return str(who)
