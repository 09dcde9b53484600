"""load_back: host -> device for the evicted part of a path (TIER-06..08)."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from services.scheduler.core.ghosts import Fate
from services.scheduler.core.host_memory import HostMemory
from services.scheduler.core.node import HostSpan, Node
from services.scheduler.core.operations import Load
from services.scheduler.core.pages import HostPool, Pages
from services.scheduler.core.state import State
from shared.messages.worker import LoadPages
from shared.packed import pack, unpack


class _Piece(NamedTuple):
    """A part of a failed load's path whose host pages are still good."""

    key: bytes
    span: HostSpan
    hit_count: int


class LoadBack:
    """Starts loads and mends the tree after one that failed."""

    def __init__(self, state: State, host: HostMemory) -> None:
        self._state = state
        self._host = host

    def start(self, nodes: list[Node], pages: Pages) -> None:
        """Give the evicted `nodes` (a locked chain, ancestors first) device `pages` and fill them.

        One LoadPages for each run of nodes in one pool.
        """
        borders = [0, *(i for i, (a, b) in enumerate(pairwise(nodes), 1) if _pool(a) is not _pool(b)), len(nodes)]
        at = 0
        for first, last in pairwise(borders):
            run = nodes[first:last]
            size = sum(node.pages for node in run)
            self._start_run(run, pages[at : at + size])
            at += size

    def _start_run(self, nodes: list[Node], pages: Pages) -> None:
        tree = self._state.tree
        pool = _pool(nodes[0])
        host_pages = np.concatenate([node.host.pages for node in nodes if node.host is not None])
        operation = Load(pool=pool, host_pages=host_pages, lock=tree.lock(nodes[-1]))
        digests = b"".join(digest for node in nodes for digest in tree.digests(node))
        at = 0
        for node in nodes:
            tree.set_value(node, pages[at : at + node.pages])
            node.loading = operation
            at += node.pages
        pool.pin(host_pages)
        pool.read[host_pages] = True
        message = LoadPages(
            self._state.operations.new_id(),
            pool.storage_id,
            pool.segment_epoch,
            pack(host_pages),
            pack(pages),
            digests,
        )
        self._state.counters["load_back_pages"] += len(pages)
        self._state.operations.start(operation, message, self._state.workers)

    def loaded(self, operation: Load) -> None:
        """LoadDone of all ranks."""
        if not operation.failed and operation.lock is not None:
            for node in self._state.tree.covered(operation.lock, len(operation.host_pages)):
                node.loading = None
            for request in operation.requests:
                request.loads.discard(operation)
        self.settle(operation)

    def failed(self, operation: Load) -> None:
        """Take the loading nodes out of the tree; the host pages before the first bad one come back without a value.

        The removed nodes keep their device pages until the load has settled and no request holds them.
        """
        lock, tree = operation.lock, self._state.tree
        self._state.counters["load_back_failed"] += 1
        if lock is None or lock.node is None:
            return
        nodes = tree.covered(lock, len(operation.host_pages))
        top, parent = nodes[0], nodes[0].parent
        if top.detached or parent is None:
            return
        good = len(operation.host_pages) if operation.bad_from < 0 else operation.bad_from
        digests = [digest for node in nodes for digest in tree.digests(node)]
        pieces = self._take_spans(nodes, good)
        movable = [] if operation.bad_from >= 0 else _host_only_children(nodes[-1])
        for child in movable:
            tree.unlink(child)
        with self._state.ghosts.because(Fate("behind_gap", "load_back")):
            removed = tree.detach(top)
        self._state.device.free(removed.device)
        self._host.release(removed.host)
        self._state.ghosts.note("host", digests[good : good + 1], "corrupted", "load_back")
        self._state.ghosts.note("host", digests[good + 1 :], "behind_gap")
        for piece in pieces:
            parent = tree.graft(parent, piece.key, piece.span)
            parent.hit_count = piece.hit_count
        for child in movable:
            tree.link(parent, child)

    def _take_spans(self, nodes: list[Node], good: int) -> list[_Piece]:
        """Take the host spans from `nodes`: the first `good` pages are kept as pieces, the rest is released."""
        tree, pieces, at = self._state.tree, [], 0
        for node in nodes:
            size = max(0, min(node.pages, good - at))
            at += node.pages
            if node.host is None:
                continue
            pool, pages = tree.drop_host(node)
            self._host.release([HostSpan(pool, pages[size:])])
            if size:
                piece = _Piece(node.key[: size * tree.page_bytes], HostSpan(pool, pages[:size]), node.hit_count)
                pieces.append(piece)
        return pieces

    def settle(self, operation: Load) -> None:
        """No worker touches the pages any more."""
        lock, operation.lock = operation.lock, None
        if lock is not None:
            self._state.unlock(lock)
        if operation.pool is not None:
            self._host.unpin(operation.pool, operation.host_pages)


def _pool(node: Node) -> HostPool:
    assert node.host is not None
    return node.host.pool


def _host_only_children(node: Node) -> list[Node]:
    return [child for child in node.children.values() if child.value is None and not child.lock_ref]


def first_bad(positions: bytes, pages: int) -> int:
    """The first page position that a worker found bad; 0 when it named none."""
    bad = unpack(positions)
    return int(bad.min()) if len(bad) and 0 <= bad.min() < pages else 0
