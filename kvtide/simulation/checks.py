"""What must hold during a run, and at its end."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvtide.simulation.content import PageContent, root
from services.scheduler.core.operations import Step
from services.scheduler.core.status import ready
from shared.packed import pack

if TYPE_CHECKING:
    from kvtide.simulation.process import Process
    from kvtide.simulation.segment import Segment
    from kvtide.simulation.storage import SimStorage
    from kvtide.simulation.worker import SimWorker
    from kvtide.simulation.world import World
    from services.scheduler.core.core import Core
    from services.scheduler.core.node import Node
    from services.scheduler.core.pages import PagePool


def is_quiet(world: "World") -> bool:
    """Every request has ended, every process is known, no operation is in flight."""
    core = world.shell.core
    if core.state.operations.table or world.ended < len(world.asks) or not world.shell.alive:
        return False
    if len(world.storages) < len(world.plan.backends):
        return False
    if any(not each.alive or not each.up or each.scheduler_epoch != world.shell.epoch for each in _processes(world)):
        return False
    usable = sum(pool.usable for pool in core.host.pools.values())
    return ready(core) and usable == len(world.storages)


def _processes(world: "World") -> "list[Process]":
    return [*world.workers, *world.storages, world.gateway]


def unfinished(world: "World") -> str:
    """Why it isn't quiet."""
    core = world.shell.core
    asks = [ask.request_id for ask in world.asks if not ask.ended]
    operations = [f"{type(each).__name__} {each.op_id}" for each in core.state.operations.table.values()]
    requests = [repr(request) for request in core.requests.all.values()]
    up = [str(process.key) for process in _processes(world) if not process.up]
    return f"asks {asks[:5]}, requests {requests[:5]}, operations {operations[:8]}, ready {ready(core)}, down {up}"


def check_end(world: "World") -> None:
    """Nothing is left behind."""
    core = world.shell.core
    tree, device = core.state.tree, core.state.device
    left = {
        "requests": len(core.requests.all) + len(core.requests.running) + len(core.requests.draining),
        "locks": len(tree.locks),
        "removed nodes": len(tree.detached),
        "operations": len(core.state.operations.table),
        "rows": world.plan.rows - len(core.requests.rows),
        "device pages": device.total - device.available - tree.evictable,
        "protected pages": tree.protected,
        "hungry lookups": len(core.prefetcher.hungry()),
        "loading nodes": sum(node.loading is not None for node in tree.nodes()),
        "writing nodes": sum(node.writing is not None for node in tree.nodes()),
    }
    for pool in core.host.pools.values():
        cached = sum(node.pages for node in tree.nodes() if node.host is not None and node.host.pool is pool)
        left |= {
            "host pages": pool.total - pool.available - cached - len(pool.orphans),
            "pins": int(pool.pins.sum()),
            "prefetching": pool.prefetching,
            "archiving": pool.archiving,
            "releasing": pool.releasing,
        }
    if any(left.values()):
        world.fail(f"left behind: { ({what: count for what, count in left.items() if count}) }")
    for storage in world.storages:
        _check_names(world, storage)
    _check_hits(world)
    if world.shell.subscriber is not None:
        world.shell.subscriber.check(core)


def check_progress(world: "World", core: "Core") -> None:
    """The oldest request always gets on: where a group is ready and requests wait, something is in flight."""
    if core.requests.all and core.state.ready and not core.state.operations.table and not core.superseded:
        world.fail(f"requests wait for nothing: {unfinished(world)}")


def check_device_use(worker: "SimWorker", pages: Iterable[int]) -> None:
    """A step or copy touches device pages now: none may be free, whoever has given it up."""
    core = worker.world.shell.core
    known = core.peers.workers.get(worker.rank)
    if known is not None and known.key == worker.key and not core.state.device.dead:
        _check_use(worker.world, "device", core.state.device, pages)


def check_host_use(world: "World", segment: "Segment", pages: Iterable[int]) -> None:
    """The same for host pages."""
    for pool in world.shell.core.host.pools.values():
        if pool.segment_epoch == segment.info.epoch:
            _check_use(world, "host", pool, pages)


def _check_use(world: "World", name: str, pool: "PagePool", pages: Iterable[int]) -> None:
    used, free = set(pages), pool.free_pages().tolist()
    if not used.isdisjoint(free) and world.shell.alive:
        world.fail(f"{name} pages {sorted(used.intersection(free))} are free, and still written or read")


def _check_hits(world: "World") -> None:
    """A node was hit at most once by each request that could have come through it (TIER-01)."""
    paths = [(ask.root, pack(ask.prompt + ask.expected), ask.attempts) for ask in world.asks]
    for seed, top in world.shell.core.state.tree.roots.items():
        here = [(tokens, attempts) for start, tokens, attempts in paths if start == root(seed)]
        stack = [(child, b"") for child in top.children.values()]
        while stack:
            node, above = stack.pop()
            path = above + node.key
            most = sum(attempts for tokens, attempts in here if tokens.startswith(path))
            if node.hit_count > most:
                world.fail(f"a node was hit {node.hit_count} times by {most} requests")
            stack += [(child, path) for child in node.children.values()]


def _check_names(world: "World", storage: "SimStorage") -> None:
    """The storage's names are exactly the tree's host pages."""
    segment = storage.current
    if segment is None:
        return
    held: set[int] = set()
    for node in world.shell.core.state.tree.nodes():
        if node.host is not None and node.host.pool.segment_epoch == segment.info.epoch:
            held.update(node.host.pages.tolist())
    for pool in world.shell.core.host.pools.values():
        if pool.segment_epoch == segment.info.epoch:
            held.update(pool.orphans.values())
    names = {page for page in segment.names if page in segment.leased}
    if held != names:
        world.fail(f"host pages {sorted(held ^ names)} have a name or a node, not both")


def check_names(world: "World") -> None:
    """No page is free that has a name: its release is awaited (docs/protocol.md: The life of a page, in messages)."""
    for pool in world.shell.core.host.pools.values():
        segment = world.segments.get((pool.storage_id, pool.segment_epoch))
        free = pool.free_pages().tolist()
        if segment is not None and not segment.names.keys().isdisjoint(free) and world.shell.alive:
            world.fail(f"host pages {sorted(segment.names.keys() & set(free))} are free, and have a name")


def check_contents(world: "World") -> None:
    """Every page of the tree that can be used holds what its node says."""
    core = world.shell.core
    known = [core.peers.workers.get(rank) for rank in range(world.ranks)]
    same = all(peer is not None and peer.key == world.workers[rank].key for rank, peer in enumerate(known))
    on_device = same and not core.state.device.dead
    doubtful = {
        page
        for operation in core.state.operations.table.values()
        if isinstance(operation, Step)
        for pages in operation.device_pages
        for page in pages.tolist()
    }
    for rank in range(world.ranks):
        _check_rank(world, rank, on_device, doubtful)


def _check_rank(world: "World", rank: int, on_device: bool, doubtful: set[int]) -> None:
    tree, device = world.shell.core.state.tree, world.workers[rank].device
    for seed, top in tree.roots.items():
        stack: list[tuple[Node, int]] = [(child, root(seed)) for child in top.children.values()]
        while stack:
            node, start = stack.pop()
            pages, end = world.wanted(start, node.key, rank)
            if on_device and node.value is not None and node.loading is None:
                for page, wanted in zip(node.value.tolist(), pages, strict=True):
                    if device.read(page) != wanted and page not in doubtful:
                        world.fail(f"device page {page} of the tree holds something else on rank {rank}")
            if node.host is not None:
                _check_host(world, node, pages, rank)
            stack += [(child, end) for child in node.children.values()]


def _check_host(world: "World", node: "Node", pages: list[PageContent], rank: int) -> None:
    assert node.host is not None
    segment = world.segments.get((node.host.pool.storage_id, node.host.pool.segment_epoch))
    if segment is None:
        world.fail("a node has host pages in a segment that never was")
        return
    digests = world.shell.core.state.tree.digests(node)
    for page, digest, wanted in zip(node.host.pages.tolist(), digests, pages, strict=True):
        name = segment.names.get(page)
        if name is None or name.digest != digest:
            world.fail(f"host page {page} of the tree has no or another name")
        if segment.content[rank][page] != wanted and page not in segment.spoilt:
            world.fail(f"host page {page} of the tree holds something else")
