"""Device pages: allocation, eviction, and what requests leave in the tree (ALLOC-02, TIER-04, TREE-07)."""

import numpy as np

from services.scheduler.core.backup import Backup, WriteBack
from services.scheduler.core.ghosts import Fate
from services.scheduler.core.host_memory import HostMemory
from services.scheduler.core.pages import Pages, joined
from services.scheduler.core.request import Request
from services.scheduler.core.reuse import last_of_a_kind, mark
from services.scheduler.core.state import State


class DeviceMemory:
    """The device pool of the worker group."""

    def __init__(self, state: State, host: HostMemory, backup: Backup) -> None:
        self._state = state
        self._host = host
        self._backup = backup
        self.waits = False  # the last `alloc` waits for a backup

    def has_room(self, pages: int) -> bool:
        """Could `pages` pages be allocated now, evicting if need be?"""
        return self._state.device.available + self._state.tree.evictable + self._backup.evicting() >= pages

    def alloc(self, count: int, request: Request) -> Pages | None:
        """`count` pages for a request, evicting the shortfall. None when that isn't enough, and nothing evicted then;
        None also while backups come first (write_back): `waits` says that trying again after an ack may help."""
        self.waits = False
        if not self.has_room(count):
            return None
        short = count - self._state.device.available
        if short > 0:
            with self._state.ghosts.because(Fate("evicted", "admission", request.key.request_id, request.seed)):
                self.evict(short)
        return self._state.device.alloc(count)

    def evict(self, count: int) -> None:
        """Free at least `count` pages of evictable leaves, at once or at the Committed of their backups (TIER-04)."""
        tree, reuse, found = self._state.tree, self._state.reuse, self._backup.evicting()
        self.waits = found > 0
        freed: list[Pages] = []
        while found < count:
            node = tree.device_leaves.pop()
            if node is None:
                break
            if reuse is not None:
                tree.cut(node, last_of_a_kind(node))
            if node.host is not None:
                freed.append(tree.drop_value(node))
            elif (outcome := self._backup.write_back(node)) is WriteBack.IMPOSSIBLE:
                self._backup.passed_over(node, count - found)
                removed = tree.evict_end(node, count - found)
                self._host.release(removed.host)
                freed.append(removed.device)
                found += len(removed.device)
                continue
            else:
                self.waits = True
                if outcome is WriteBack.WAITS:
                    tree.device_leaves.offer(node)
                    break
            found += node.pages
        pages = joined(freed)
        self._state.device.free(pages)
        self._state.counters["device_evicted_pages"] += len(pages)
        if reuse is not None:
            reuse.device.evicted += len(pages)

    def cache_finished_req(self, request: Request) -> None:
        """Give the tree the request's computed whole pages; free duplicates and the tail."""
        full = self._insert(request)
        self._state.device.free(request.pages[max(full, request.shared) :])

    def cache_unfinished_req(self, request: Request) -> None:
        """The same between two chunks: the request goes on with the tree's pages and a longer lock."""
        full = self._insert(request)
        if full <= request.shared or request.lock is None:
            return
        match = self._state.tree.match_prefix(request.seed, bytes(request.tokens), full, request.priority)
        lock = self._state.tree.lock(match.end)
        self._state.unlock(request.lock)
        request.lock = lock
        for node in match.device:
            if node.loading is not None and not node.loading.failed:
                node.loading.requests.add(request)
                request.loads.add(node.loading)
        shared = np.concatenate([node.value for node in match.device if node.value is not None])
        if shared.tobytes() != request.pages[:full].tobytes():
            changed = np.flatnonzero(shared != request.pages[:full])
            request.synced = min(request.synced, int(changed[0]))
        request.pages = np.concatenate([shared, request.pages[full:]])
        request.shared = full

    def _insert(self, request: Request) -> int:
        known = min(request.computed, request.length)  # a step that overshot the end computed an unknown token
        full = known // self._state.settings.page_size
        inserted = self._state.tree.insert(
            request.seed, bytes(request.tokens), request.pages[:full], request.shared, request.priority
        )
        self._state.device.free(inserted.duplicates)
        if self._state.reuse is not None:
            mark(inserted.path, request.frequencies, self._state.tree.device_leaves)
        self._backup.count_hits(inserted.path, request.counted)
        request.counted = max(request.counted, full)
        return full
