"""What the core says of itself: the body of `kvtide status` (docs/operations.md)."""

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from services.scheduler.core.integrity import check_integrity
from services.scheduler.core.operations import Step
from services.scheduler.core.pages import HostPool
from services.scheduler.core.prefixes import top_prefixes
from services.scheduler.core.request import RequestState
from shared.errors import IntegrityError

if TYPE_CHECKING:
    from services.scheduler.core.core import Core


def integrity(core: "Core") -> str:
    """ "ok", or what `check_integrity` found. It takes time in proportion to the tree: `status` leaves it out."""
    try:
        check_integrity(core)
    except IntegrityError as error:
        return str(error)
    return "ok"


def status(core: "Core") -> dict[str, Any]:
    """Plain data. Pages everywhere; `locked` counts nodes, `in_flight` and `quarantined` pages of all pools."""
    device, pinned = _device(core), core.admin.pins.locked()
    hosts = {pool.storage_id: _host(core, pool) for pool in core.host.pools.values()}
    return {
        "ready": ready(core),
        "locked": sum(node.lock_ref > pinned.get(node, 0) and not node.is_root for node in core.state.tree.nodes()),
        "pins": {"count": len(core.admin.pins), "pages": core.admin.pins.pages},
        "in_flight": device["in_flight"] + sum(host["in_flight"] for host in hosts.values()),
        "quarantined": device["quarantined"] + sum(host["quarantined"] for host in hosts.values()),
        "requests": _requests(core),
        "device": device,
        "host": hosts,
        "tree": {"nodes": sum(1 for _ in core.state.tree.nodes()), "namespaces": len(core.state.tree.roots)},
        "regret": _regret(core),
        "prefixes": top_prefixes(core.state.tree, core.state.ghosts),
        "counters": dict(sorted(core.state.counters.items())),
    }


def ready(core: "Core") -> bool:
    """Every part that the configuration asks for can be used."""
    return core.state.ready and (
        not core.state.settings.host_tier or any(pool.usable for pool in core.host.pools.values())
    )


def _requests(core: "Core") -> dict[str, int]:
    states = Counter(request.state.value for request in core.requests.all.values())
    states[RequestState.QUEUED.value] += len(core.requests.early)
    return {state.value: states[state.value] for state in RequestState} | {
        "open": len(core.requests.all) + len(core.requests.early)
    }


def _device(core: "Core") -> dict[str, int]:
    pool, tree = core.state.device, core.state.tree
    steps = [op for op in core.state.operations.table.values() if isinstance(op, Step)]
    loading = sum(node.pages for node in tree.nodes() if node.loading is not None)
    return {
        "total": 0 if pool.dead else pool.total,
        "free": 0 if pool.dead else pool.available,
        "evictable": tree.evictable,
        "protected": tree.protected,
        "requests": sum(len(r.own_pages) for r in [*core.requests.running, *core.requests.draining]),
        "in_flight": loading,
        "quarantined": sum(len(pages) for step in steps for pages in step.device_pages),
    }


def _regret(core: "Core") -> dict[str, float] | None:
    """What device and host gave of late, and the optimum; None when nothing is remembered, or too little."""
    if core.state.window is None:
        return None
    pages = core.state.device.total + sum(pool.total for pool in core.host.pools.values())
    found = core.state.window.compare(pages)
    return found._asdict() if found is not None else None


def _host(core: "Core", pool: HostPool) -> dict[str, int]:
    held = [op for op in core.state.operations.table.values() if op.pool is pool]
    moving = len(core.host.queued_pages(pool)) + len(core.host.doomed_pages(pool))
    return {
        "total": pool.total,
        "free": pool.available,
        "cached": sum(node.pages for node in core.state.tree.nodes() if node.host and node.host.pool is pool),
        "orphaned": len(pool.orphans),
        "pinned": int(np.count_nonzero(pool.pins)),
        "in_flight": moving + sum(len(op.held_host_pages) for op in held if not op.failed),
        "quarantined": sum(len(op.held_host_pages) for op in held if op.failed),
        "usable": int(pool.usable),
        "draining": int(pool.draining),
    }
