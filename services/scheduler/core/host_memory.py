"""Host pages: allocation, eviction, release (TIER-05; design: Names, Spans)."""

from collections.abc import Iterable

import numpy as np

from services.scheduler.core.archive import Archiver
from services.scheduler.core.events import PeerKey
from services.scheduler.core.ghosts import EVICTED, Fate
from services.scheduler.core.node import HostSpan, Node
from services.scheduler.core.operations import Release
from services.scheduler.core.pages import HostPool, Pages, some
from services.scheduler.core.settings import SLOW_START_S
from services.scheduler.core.state import State
from shared.messages.storage import ReleasePages
from shared.packed import pack

RELEASE_BATCH = 4096  # pages in one ReleasePages: 16 KB on the wire


class HostMemory:
    """The pools of all storages, and the pages on their way back to them."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.pools: dict[PeerKey, HostPool] = {}  # by storage process
        self.archiver = Archiver(state, self)
        self.doomed: dict[HostPool, set[int]] = {}  # out of the tree, but a copy still reads them
        self._to_release: dict[HostPool, list[Pages]] = {}

    def pool_for(self, count: int, parent: HostPool | None, backend_id: str | None = None) -> HostPool | None:
        """The pool for `count` new pages: the parent's if it has room, else the one with most room; when none has
        room, the one to evict in: the parent's. With `backend_id`: among those with this L3."""
        usable = [
            pool
            for pool in self.pools.values()
            if pool.usable
            and not pool.draining
            and (backend_id is None or (pool.backend is not None and pool.backend.backend_id == backend_id))
        ]
        if len(usable) <= 1:
            return usable[0] if usable else None
        if parent in usable and parent is not None and parent.available >= count:
            return parent
        roomy = max(usable, key=self._room)
        if self._room(roomy) >= count:
            return roomy
        return parent if parent in usable else max(usable, key=lambda pool: pool.available + pool.releasing)

    def _room(self, pool: HostPool) -> float:
        return pool.available * min(1.0, (self._state.now - pool.since) / SLOW_START_S)

    def lookups(self) -> dict[str, PeerKey]:
        """One storage for each distinct L3, by backend id."""
        return {
            pool.backend.backend_id: key
            for key, pool in self.pools.items()
            if pool.usable and not pool.draining and pool.backend is not None
        }

    def storage_of(self, pool: HostPool) -> PeerKey | None:
        """The process that owns a usable pool."""
        return next((key for key, candidate in self.pools.items() if candidate is pool and pool.usable), None)

    def evict_host(self, pool: HostPool, wanted: int, cause: Fate = EVICTED) -> bool:
        """Release host leaves until `wanted` pages are free or on their way. False when too few can go.

        `cause` is what they make room for. In write_back a leaf goes to L3 first, and is released when it is met
        again after that.
        """
        to_l3 = self._state.settings.write_policy == "write_back"
        while (coming := pool.available + pool.releasing + (pool.archiving if to_l3 else 0)) < wanted:
            if pool.orphans:
                self._release_orphans(pool, wanted - coming)
                continue
            node = pool.leaves.pop()
            if node is None:
                return False
            span = node.host
            if span is None or some(span.pool.pins[span.pages]):
                pool.leaves.park(node)
                continue
            if to_l3 and self.archiver.wants(node) and self.archiver.start([node]):
                pool.leaves.park(node)
                continue
            self._evict(node, cause)
        return True

    def empty(self, pool: HostPool, cause: Fate) -> None:
        """Release all that can go of a pool, with what follows it in other pools, unless the device has it, too: else
        the pool would wait for as long as anybody uses that."""
        if self.evict_host(pool, pool.total, cause) or not pool.cached:
            return
        to_l3 = self._state.settings.write_policy == "write_back"
        for node in list(self._state.tree.nodes()):
            span = node.host
            if span is None or span.pool is not pool or node.detached or some(pool.pins[span.pages]):
                continue
            if (node.value is not None or not node.lock_ref) and not (to_l3 and self.archiver.wants(node)):
                self._evict(node, cause)

    def _evict(self, node: Node, cause: Fate) -> None:
        self._state.counters["host_evicted_pages"] += node.pages
        if node.host is not None:
            if self._state.reuse is not None:
                self._state.reuse.hosts[node.host.pool].evicted += node.pages
            unread = np.count_nonzero(~node.host.pool.read[node.host.pages])
            self._state.counters["host_evicted_unread_pages"] += int(unread)
        with self._state.ghosts.because(cause):
            if node.value is None:
                removed = self._state.tree.detach(node)
                self._state.device.free(removed.device)
                self.release(removed.host)
            else:
                node.shed = True
                self.release([self._state.tree.drop_host(node)])

    def _release_orphans(self, pool: HostPool, count: int) -> None:
        gone = [pool.orphans.popitem(last=False) for _ in range(min(count, len(pool.orphans)))]
        self._state.ghosts.note("host", [digest for digest, _ in gone], "evicted", "orphaned")
        taken = [page for _, page in gone]
        self._state.counters["orphans_evicted_pages"] += len(taken)
        self.release([HostSpan(pool, np.array(taken, np.int32))])

    def orphan(self, pool: HostPool, named: list[tuple[int, bytes]]) -> None:
        """A new pool's pages that have a name already: an earlier scheduler's (docs/architecture.md: Restarts)."""
        if not named:
            return
        pool.take(np.array([page for page, _ in named], np.int32))
        doubled = [page for page, digest in named if pool.orphans.setdefault(digest, page) != page]
        self._state.counters["orphaned_pages"] += len(pool.orphans)
        self.release([HostSpan(pool, np.array(doubled, np.int32))])

    def release(self, spans: Iterable[HostSpan]) -> None:
        """Take the names of pages back that no node holds any more; those that a copy reads follow later."""
        for pool, pages in spans:
            if pool.dead or not len(pages):
                continue
            pinned = pool.pins[pages] > 0
            if some(pinned):
                self.doomed.setdefault(pool, set()).update(pages[pinned].tolist())
            self._queue_release(pool, pages[~pinned])

    def unpin(self, pool: HostPool, pages: Pages) -> None:
        """The copy has ended."""
        if pool.dead:
            return
        pool.unpin(pages)
        doomed = self.doomed.get(pool)
        if doomed:
            ready = [page for page in pages.tolist() if page in doomed and not pool.pins[page]]
            doomed.difference_update(ready)
            self._queue_release(pool, np.array(ready, np.int32))
        pool.leaves.unpark()
        self._state.space_freed = True

    def flush(self) -> None:
        """Send what `release` has gathered; a pool that can't be used now keeps it."""
        for pool in [pool for pool in self._to_release if pool.usable]:
            storage = self.storage_of(pool)
            pages = np.concatenate(self._to_release.pop(pool))
            for start in range(0, len(pages) if storage else 0, RELEASE_BATCH):
                part = pages[start : start + RELEASE_BATCH]
                operation = Release(pool=pool, host_pages=part)
                message = ReleasePages(self._state.operations.new_id(), pool.segment_epoch, pack(part))
                self._state.operations.start(operation, message, [storage] if storage else [])

    def released(self, operation: Release) -> None:
        """The release has settled: acked, or its storage has fenced and must be asked again."""
        pool = operation.pool
        if pool is None or pool.dead:
            return
        pool.releasing -= len(operation.host_pages)
        if operation.failed:
            self._queue_release(pool, operation.host_pages)
        else:
            pool.free(operation.host_pages)
            self._state.space_freed = True

    def give_back(self, pool: HostPool | None, pages: Pages) -> None:
        """Free pages that never had a name."""
        if pool is not None and not pool.dead and len(pages):
            pool.free(pages)
            self._state.space_freed = True

    def lose(self, storage: PeerKey) -> None:
        """The storage process has ended: its pool is gone, and with it every span in it."""
        pool = self.pools.pop(storage, None)
        if pool is None:
            return
        pool.dead = True
        self.doomed.pop(pool, None)
        self._to_release.pop(pool, None)
        tree = self._state.tree
        with self._state.ghosts.because(Fate("lost", "storage")):
            for node in list(tree.nodes()):
                if node.host is not None and node.host.pool is pool:
                    tree.drop_host(node)
                if not node.detached and not node.is_root and node.value is None and node.host is None:
                    removed = tree.detach(node)
                    self._state.device.free(removed.device)
                    self.release(removed.host)

    def queued(self, pool: HostPool) -> int:
        """Number of `queued_pages`."""
        return sum([len(pages) for pages in self._to_release[pool]]) if pool in self._to_release else 0

    def queued_pages(self, pool: HostPool) -> Pages:
        """Pages whose ReleasePages is not sent yet, for `check_integrity`."""
        return np.concatenate([np.empty(0, np.int32), *self._to_release.get(pool, [])])

    def doomed_pages(self, pool: HostPool) -> Pages:
        """Pages that will be released when a copy has ended, for `check_integrity`."""
        return np.array(sorted(self.doomed.get(pool, ())), np.int32)

    def _queue_release(self, pool: HostPool, pages: Pages) -> None:
        if len(pages):
            pool.releasing += len(pages)
            self._to_release.setdefault(pool, []).append(pages)
