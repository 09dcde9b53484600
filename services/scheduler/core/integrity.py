"""check_integrity: every page in exactly one place, every count right (TREE-10).

It is written for speed, as the simulation calls it after every event: one walk over the tree, one count of each pool's
ids. Who breaks an invariant is looked for only when one is broken.
"""

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from services.scheduler.core.events import CPU, GPU
from services.scheduler.core.node import Node
from services.scheduler.core.operations import Find, Operation, Prefetch, Release, Step
from services.scheduler.core.pages import HostPool, PagePool, Pages
from services.scheduler.core.request import Request, RequestState
from services.scheduler.core.tree import RadixTree
from services.scheduler.core.tree_holds import Lock
from shared.errors import IntegrityError

if TYPE_CHECKING:
    from services.scheduler.core.core import Core

Claim = tuple[object, Pages]  # who holds pages: a node, a request, an operation, or the name of a list


def check_integrity(core: "Core") -> None:
    """Raises IntegrityError naming the page, node or lock that breaks an invariant. O(everything)."""
    tree, device, requests = core.state.tree, core.state.device, core.requests
    operations = list(core.state.operations.table.values())
    on_device = [*requests.running, *requests.draining]
    device_claims, host_claims = _walk(tree, _lock_counts(tree))
    if not device.dead:
        device_claims.append(("the free list", device.free_pages()))
        device_claims += [(request, request.own_pages) for request in on_device]
        for operation in operations:
            if isinstance(operation, Step):
                device_claims += [(operation, pages) for pages in operation.device_pages]
        _check_pool("device", device, device_claims)
    for pool in core.host.pools.values():
        _check_host_pool(core, pool, host_claims.pop(pool, []), [each for each in operations if each.pool is pool])
    for pool, claims in host_claims.items():
        raise IntegrityError(f"{_name(claims[0][0])} has pages in a pool of {pool.storage_id} that is gone")
    _check_holdings(core)
    _check_owners(core, operations)
    _check_requests(core, on_device, operations)


def _check_pool(name: str, pool: PagePool, claims: list[Claim]) -> None:
    """Each of the pool's ids is claimed once."""
    parts: list[Any] = [pages for _, pages in claims]  # buffers, though numpy's types don't say so
    held = memoryview(b"".join(parts)).cast("i")
    first = pool.end - pool.total
    if len(held) == pool.total and set(held) == _ids(first, pool.end):
        return
    owner: dict[int, object] = {}
    for who, pages in claims:
        for page in pages.tolist():
            if page in owner:
                raise IntegrityError(f"{name} page {page} is held by {_name(owner[page])} and by {_name(who)}")
            owner[page] = who
    missing = sorted(set(range(first, pool.end)) - set(owner))
    raise IntegrityError(f"{name} pages {missing[:8]} of {pool.total} are held by nobody")


@lru_cache(maxsize=16)
def _ids(first: int, end: int) -> frozenset[int]:
    return frozenset(range(first, end))


def _check_host_pool(core: "Core", pool: HostPool, claims: list[Claim], operations: list[Operation]) -> None:
    """Its ids, and its counts: cached, releasing, prefetching, pins."""
    name = f"host {pool.storage_id}"
    cached = sum([len(pages) for _, pages in claims])
    queued = core.host.queued(pool)
    claims.append(("the free list", pool.free_pages()))
    if queued:
        claims.append(("the release queue", core.host.queued_pages(pool)))
    if pool.orphans:
        claims.append(("the orphans", pool.orphaned))
    if core.host.doomed.get(pool):
        claims.append(("the doomed", core.host.doomed_pages(pool)))
    releasing, prefetching, pinned = queued, 0, []
    for operation in operations:
        held = operation.held_host_pages
        if len(held):
            claims.append((operation, held))
            releasing += len(held) if isinstance(operation, Release) else 0
            prefetching += len(held) if isinstance(operation, Prefetch) else 0
        elif len(read := operation.pinned_host_pages):
            pinned.append(read)
    for request in core.requests.all.values():
        if request.reserved is not None and request.reserved.pool is pool:
            prefetching += request.reserved.pages
    _check_pool(name, pool, claims)
    counts, are = (pool.cached, pool.releasing, pool.prefetching), (cached, releasing, prefetching)
    if counts != are:
        raise IntegrityError(f"{counts} pages of {name} count as cached, releasing and prefetching, {are} are")
    if pinned or np.count_nonzero(pool.pins):
        pins = np.bincount(np.concatenate(pinned), minlength=pool.end) if pinned else np.zeros_like(pool.pins)
        if (pins != pool.pins).any():
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


def _check_holdings(core: "Core") -> None:
    """What namespaces hold is what the tree has of them."""
    if core.state.holdings is None:
        return
    device: dict[bytes, int] = {}
    host: dict[bytes, int] = {}
    for seed, root in core.state.tree.roots.items():
        on_device = in_host = 0
        stack = [root]
        while stack:
            node = stack.pop()
            on_device += node.pages if node.value is not None else 0
            in_host += node.pages if node.host is not None else 0
            stack.extend(node.children.values())
        if on_device:
            device[seed] = on_device
        if in_host:
            host[seed] = in_host
    counted = core.state.holdings.pages
    if (dict(counted[GPU]), dict(counted[CPU])) != (device, host):
        raise IntegrityError("the pages of a namespace are counted wrongly")


def _walk(tree: RadixTree, locks: dict[Node, int]) -> tuple[list[Claim], dict[HostPool, list[Claim]]]:
    """Every node's own invariants; what nodes hold on the device and in each host pool."""
    device: list[Claim] = []
    host: dict[HostPool, list[Claim]] = {}
    evictable = protected = 0
    device_leaves = set(tree.device_leaves.nodes())
    host_leaves: dict[HostPool, set[Node]] = {}
    stack = list(tree.roots.values())
    while stack:
        node = stack.pop()
        value, span, pages = node.value, node.host, node.pages
        lock_ref = node.lock_ref
        if lock_ref != locks.pop(node, 0):
            _wrong_locks(tree, node)
        valued = backed = 0
        if node.children:
            for child in node.children.values():
                valued += child.value is not None
                backed += child.host is not None
                stack.append(child)
        if valued != node.valued_children or backed != node.backed_children:
            raise IntegrityError(f"{_name(node)} counts its children wrongly")
        if value is not None:
            device.append((node, value))
            if len(value) != pages:
                raise IntegrityError(f"{_name(node)} covers {pages} pages and holds {len(value)}")
            if lock_ref:
                protected += pages
            else:
                evictable += pages
                if not valued and node not in device_leaves:
                    raise IntegrityError(f"{_name(node)} is a device leaf that eviction can't see")
        elif valued and not node.is_root:
            raise IntegrityError(f"a child of a {_name(node)} is on the device, its parent isn't")
        if span is not None:
            if span.pool not in host:
                host[span.pool] = []
                host_leaves[span.pool] = set(span.pool.leaves.nodes())
            host[span.pool].append((node, span.pages))
            if len(span.pages) != pages:
                raise IntegrityError(f"{_name(node)} covers {pages} pages and holds {len(span.pages)} host pages")
            if not backed and (value is not None or not lock_ref) and node not in host_leaves[span.pool]:
                raise IntegrityError(f"{_name(node)} is a host leaf that eviction can't see")
        elif value is None and not node.is_root:
            raise IntegrityError(f"{_name(node)} has pages nowhere")
    for node in tree.detached:
        if node.lock_ref != locks.get(node, 0):
            _wrong_locks(tree, node)
        if node.value is not None:
            device.append((node, node.value))
            protected += node.pages if node.lock_ref else 0
            evictable += 0 if node.lock_ref else node.pages
    for node, count in locks.items():  # nodes that have left the tree without device pages
        if node.lock_ref != count:
            _wrong_locks(tree, node)
    if (evictable, protected) != (tree.evictable, tree.protected):
        counted = f"{tree.evictable} pages count as evictable and {tree.protected} as protected"
        raise IntegrityError(f"{counted}, {evictable} and {protected} are")
    return device, host


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
        if isinstance(operation, Step):
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
        if isinstance(operation, Find | Prefetch) and operation.failed and operation.requests:
            raise IntegrityError(f"requests wait for operation {operation.op_id}, which has failed")


def _name(who: object) -> str:
    match who:
        case Node():
            return f"node of {who.pages} pages{' (root)' if who.is_root else ''}{' (removed)' if who.detached else ''}"
        case Operation():
            return f"{type(who).__name__} {who.op_id}"
    return str(who)
