"""check_integrity: every page in exactly one place, every count right (TREE-10)."""

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from services.scheduler.core.leaves import device_evictable, host_evictable
from services.scheduler.core.node import Node
from services.scheduler.core.operations import Find, Prefetch, Step
from services.scheduler.core.pages import HostPool, PagePool, Pages
from services.scheduler.core.request import RequestState
from services.scheduler.core.tree import RadixTree
from services.scheduler.core.tree_holds import Lock
from shared.errors import IntegrityError

if TYPE_CHECKING:
    from services.scheduler.core.core import Core

Claim = tuple[str | Node, Pages]


def check_integrity(core: "Core") -> None:
    """Raises IntegrityError naming the page, node or lock that breaks an invariant. O(everything)."""
    nodes = [*core.state.tree.nodes(), *core.state.tree.detached]
    _check_pool("device", core.state.device, _device_claims(core, nodes))
    for pool in core.host.pools.values():
        _check_pool(f"host {pool.storage_id}", pool, _host_claims(core, pool, nodes))
        _check_pins(core, pool)
    _check_tree(core.state.tree, nodes)
    _check_locks(core, nodes)
    _check_requests(core)
    check_sums(core)


def check_sums(core: "Core") -> None:
    """TREE-10's sum in every pool, by its counters: O(operations + requests), for every event of a simulation."""
    operations = core.state.operations.table.values()
    device, tree = core.state.device, core.state.tree
    if not device.dead:
        held = sum(len(request.pages) - request.shared for request in core.requests.running)
        held += sum(len(request.pages) - request.shared for request in core.requests.draining)
        held += sum(len(pages) for op in operations if isinstance(op, Step) for pages in op.device_pages)
        found = device.available + tree.evictable + tree.protected + held
        if found != device.total:
            raise IntegrityError(f"{found} device pages are held, there are {device.total}")
    for pool in core.host.pools.values():
        doomed = len(core.host.doomed.get(pool, ()))
        queued = core.host.queued(pool)
        flying = sum([len(operation.held_host_pages) for operation in operations if operation.pool is pool])
        found = pool.available + len(pool.orphans) + pool.cached + doomed + queued + flying
        if found != pool.total:
            raise IntegrityError(f"{found} host pages of {pool.storage_id} are held, there are {pool.total}")


def _check_pool(name: str, pool: PagePool, claims: Iterator[Claim]) -> None:
    if pool.dead:
        return
    claimed = list(claims)
    held = np.concatenate([pages for _, pages in claimed])
    if np.bincount(held, minlength=pool.end).max(initial=0) > 1:
        _name_conflict(name, claimed)
    if len(held) != pool.total:
        missing = sorted(set(range(pool.end - pool.total, pool.end)) - set(held.tolist()))
        raise IntegrityError(f"{name} pages {missing[:8]} of {pool.total} are held by nobody")


def _name_conflict(name: str, claims: list[Claim]) -> None:
    owner: dict[int, str] = {}
    for claimant, pages in claims:
        who = claimant if isinstance(claimant, str) else _name(claimant)
        for page in pages.tolist():
            if page in owner:
                raise IntegrityError(f"{name} page {page} is held by {owner[page]} and by {who}")
            owner[page] = who


def _device_claims(core: "Core", nodes: list[Node]) -> Iterator[Claim]:
    yield "the free list", core.state.device.free_pages()
    for node in nodes:
        if node.value is not None:
            yield node, node.value
    for request in [*core.requests.running, *core.requests.draining]:
        yield repr(request), request.own_pages
    for operation in core.state.operations.table.values():
        if isinstance(operation, Step):
            for pages in operation.device_pages:
                yield f"step {operation.op_id} in doubt", pages


def _host_claims(core: "Core", pool: HostPool, nodes: list[Node]) -> Iterator[Claim]:
    yield "the free list", pool.free_pages()
    yield "the orphans", pool.orphaned
    yield "the release queue", core.host.queued_pages(pool)
    yield "the doomed", core.host.doomed_pages(pool)
    for node in nodes:
        if node.host is not None and node.host.pool is pool:
            yield node, node.host.pages
    for operation in core.state.operations.table.values():
        if operation.pool is pool:
            yield f"{type(operation).__name__} {operation.op_id}", operation.held_host_pages


def _check_pins(core: "Core", pool: HostPool) -> None:
    pins = np.zeros_like(pool.pins)
    for operation in core.state.operations.table.values():
        if operation.pool is pool:
            np.add.at(pins, operation.pinned_host_pages, 1)
    if (pins != pool.pins).any():
        page = int(np.argmax(pins != pool.pins))
        raise IntegrityError(f"host page {page} has {pool.pins[page]} pins, {pins[page]} operations read it")
    in_lists = len(core.host.queued_pages(pool)) + sum(
        len(op.held_host_pages)
        for op in core.state.operations.table.values()
        if op.pool is pool and type(op).__name__ == "Release"
    )
    if pool.releasing != in_lists:
        raise IntegrityError(f"{pool.releasing} host pages count as releasing, {in_lists} are")
    reserved = [request.reserved for request in core.requests.all.values() if request.reserved is not None]
    prefetching = sum(reservation.pages for reservation in reserved if reservation.pool is pool) + sum(
        len(op.held_host_pages)
        for op in core.state.operations.table.values()
        if isinstance(op, Prefetch) and op.pool is pool
    )
    if pool.prefetching != prefetching:
        raise IntegrityError(f"{pool.prefetching} host pages count as prefetching, {prefetching} are")


def _check_tree(tree: RadixTree, nodes: list[Node]) -> None:
    sizes = {False: 0, True: 0}
    for node in nodes:
        if node.value is not None:
            sizes[node.lock_ref > 0] += node.pages
        if node.detached:
            continue
        if not node.is_root and node.value is None and node.host is None:
            raise IntegrityError(f"{_name(node)} has pages nowhere")
        if node.value is not None and node.parent is not None and not node.parent.is_root and node.parent.value is None:
            raise IntegrityError(f"{_name(node)} is on the device, its parent isn't")
        valued = backed = 0
        for child in node.children.values():
            valued += child.value is not None
            backed += child.host is not None
        if (valued, backed) != (node.valued_children, node.backed_children):
            raise IntegrityError(f"{_name(node)} counts its children wrongly")
        if node.value is not None and len(node.value) != node.pages:
            raise IntegrityError(f"{_name(node)} covers {node.pages} pages and holds {len(node.value)}")
        if node.host is not None and len(node.host.pages) != node.pages:
            raise IntegrityError(f"{_name(node)} covers {node.pages} pages and holds {len(node.host.pages)} host pages")
    if sizes != {False: tree.evictable, True: tree.protected}:
        raise IntegrityError(f"evictable {tree.evictable} and protected {tree.protected} should be {sizes}")
    listed = set(tree.device_leaves.nodes())
    hosted: dict[HostPool, set[Node]] = {}
    for node in nodes:
        if node.detached:
            continue
        if device_evictable(node) and node not in listed:
            raise IntegrityError(f"{_name(node)} is a device leaf that eviction can't see")
        if node.host is not None and host_evictable(node):
            pool = node.host.pool
            if pool not in hosted:
                hosted[pool] = set(pool.leaves.nodes())
            if node not in hosted[pool]:
                raise IntegrityError(f"{_name(node)} is a host leaf that eviction can't see")


def _check_locks(core: "Core", nodes: list[Node]) -> None:
    tree = core.state.tree
    counts: Counter[Node] = Counter()
    for lock in tree.locks:
        if lock.node is None:
            raise IntegrityError("a released lock is still counted")
        counts.update(tree.upward(lock.node))
    for node in {*nodes, *counts}:
        if node.lock_ref != counts[node]:
            raise IntegrityError(f"{_name(node)} has lock_ref {node.lock_ref}, {counts[node]} locks hold it")
    held: set[Lock] = set()
    requests = [*core.requests.running, *core.requests.draining, *core.requests.all.values()]
    for request in requests:
        held.update(lock for lock in (request.lock, request.reserved and request.reserved.lock) if lock is not None)
    for operation in [*core.state.operations.table.values(), *core.prefetcher.hungry()]:
        held.update([operation.lock] if operation.lock is not None else [])
        if isinstance(operation, Step):
            held.update(operation.locks)
    if held != tree.locks:
        raise IntegrityError(f"{len(tree.locks - held)} locks belong to nobody, {len(held - tree.locks)} are unknown")


def _check_requests(core: "Core") -> None:
    rows = [request.row for request in [*core.requests.running, *core.requests.draining]]
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
    for operation in core.state.operations.table.values():
        if isinstance(operation, Find | Prefetch) and operation.failed and operation.requests:
            raise IntegrityError(f"requests wait for operation {operation.op_id}, which has failed")


def _name(node: Node) -> str:
    return f"node of {node.pages} pages{' (root)' if node.is_root else ''}{' (removed)' if node.detached else ''}"
