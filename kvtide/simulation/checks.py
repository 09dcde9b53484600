"""What must hold during a run, and at its end."""

from typing import TYPE_CHECKING

from kvtide.simulation.content import root, walk
from services.scheduler.core.operations import Step
from services.scheduler.core.status import ready

if TYPE_CHECKING:
    from kvtide.simulation.world import World
    from services.scheduler.core.node import Node


def is_quiet(world: "World") -> bool:
    """Every request has ended, every process is known, no operation is in flight."""
    core = world.shell.core
    if not world.shell.alive or any(not ask.ended for ask in world.asks) or core.state.operations.table:
        return False
    processes = [process for process in (world.worker, world.storage, world.gateway) if process is not None]
    if any(
        not process.alive or not process.up or process.scheduler_epoch != world.shell.epoch for process in processes
    ):
        return False
    return ready(core)


def unfinished(world: "World") -> str:
    """Why it isn't quiet."""
    core = world.shell.core
    asks = [ask.request_id for ask in world.asks if not ask.ended]
    operations = [f"{type(each).__name__} {each.op_id}" for each in core.state.operations.table.values()]
    requests = [repr(request) for request in core.requests.all.values()]
    up = [str(process.key) for process in (world.worker, world.storage, world.gateway) if process and not process.up]
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
            "host pages": pool.total - pool.available - cached,
            "pins": int(pool.pins.sum()),
            "prefetching": pool.prefetching,
            "archiving": pool.archiving,
            "releasing": pool.releasing,
        }
    if any(left.values()):
        world.fail(f"left behind: { ({what: count for what, count in left.items() if count}) }")
    _check_names(world)


def _check_names(world: "World") -> None:
    """The storage's names are exactly the tree's host pages."""
    storage = world.storage
    segment = storage.current if storage is not None else None
    if storage is None or segment is None:
        return
    held: set[int] = set()
    for node in world.shell.core.state.tree.nodes():
        if node.host is not None and node.host.pool.segment_epoch == segment.info.epoch:
            held.update(node.host.pages.tolist())
    if held != set(segment.names):
        world.fail(f"host pages {sorted(held ^ set(segment.names))} have a name or a node, not both")


def check_contents(world: "World") -> None:
    """Every page of the tree that can be used holds what its node says."""
    core, worker = world.shell.core, world.worker
    known = core.peers.workers.get(0)
    on_device = known is not None and known.key == worker.key and not core.state.device.dead
    doubtful = {
        page
        for operation in core.state.operations.table.values()
        if isinstance(operation, Step)
        for pages in operation.device_pages
        for page in pages.tolist()
    }
    for seed, top in core.state.tree.roots.items():
        stack: list[tuple[Node, int]] = [(child, root(seed)) for child in top.children.values()]
        while stack:
            node, start = stack.pop()
            tokens = [int.from_bytes(node.key[at : at + 4], "little") for at in range(0, len(node.key), 4)]
            slots = walk(start, tokens)
            size = world.plan.settings.page_size
            pages = [tuple(slots[at : at + size]) for at in range(0, len(slots), size)]
            if on_device and node.value is not None and node.loading is None:
                for page, wanted in zip(node.value.tolist(), pages, strict=True):
                    if worker.device.read(page) != wanted and page not in doubtful:
                        world.fail(f"device page {page} of the tree holds something else")
            if node.host is not None:
                _check_host(world, node, pages)
            stack += [(child, slots[-1].after) for child in node.children.values()]


def _check_host(world: "World", node: "Node", pages: list) -> None:  # type: ignore[type-arg]
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
        if segment.content[page] != wanted and page not in segment.spoilt:
            world.fail(f"host page {page} of the tree holds something else")
