"""write_backup: device -> host -> L3 (TIER-01..03, STORE-05)."""

from collections import deque
from collections.abc import Iterable

import numpy as np

from services.scheduler.core.host_memory import HostMemory
from services.scheduler.core.node import HostSpan, Node
from services.scheduler.core.operations import Archive, Write
from services.scheduler.core.pages import HostPool, Pages
from services.scheduler.core.settings import ARCHIVE_SHARE, MAX_WAITING_BACKUPS, WRITE_THRESHOLDS
from services.scheduler.core.state import State
from shared.messages.storage import ArchivePages, CommitPages
from shared.messages.worker import WritePages
from shared.packed import pack


class Backup:
    """Decides what is backed up, and follows each backup to its end."""

    def __init__(self, state: State, host: HostMemory) -> None:
        self._state = state
        self._host = host
        self._waiting: deque[Node] = deque()
        self.archives = False  # a storage with an L3 is there

    def count_hits(self, nodes: Iterable[Node], first: int) -> None:
        """Count a request's use of the nodes of its path that begin at page `first` or later, each once."""
        at = 0
        for node in nodes:
            if at >= first:
                node.hit_count += 1
            at += node.pages
            self.consider(node)

    def consider(self, node: Node) -> None:
        """write_backup of a node if the policy wants it and its parent is backed up (TIER-02)."""
        threshold = WRITE_THRESHOLDS[self._state.settings.write_policy]
        if node.is_root or node.hit_count < threshold or node.value is None or node.detached:
            return
        if node.host is not None or node.writing is not None or node.loading is not None:
            return
        parent = node.parent
        if parent is None or not (parent.is_root or parent.host is not None) or not self._state.ready:
            return
        pool = self._host.pool()
        if pool is None:
            return
        pages = pool.alloc(node.pages) if not self._waiting else None
        if pages is not None:
            self._start(node, pool, pages)
        elif len(self._waiting) < MAX_WAITING_BACKUPS and node not in self._waiting:
            self._waiting.append(node)
            self._state.space_freed = True
        else:
            self._state.counters["backup_dropped_waiting"] += node.pages

    def retry(self) -> None:
        """Start waiting backups as far as host pages are free, and evict for the next."""
        pool = self._host.pool()
        while self._waiting and pool is not None and self._state.ready:
            node = self._waiting[0]
            if node.value is None or node.detached or node.host is not None or node.writing is not None:
                self._waiting.popleft()
                continue
            pages = pool.alloc(node.pages)
            if pages is None:
                if node.pages > pool.total or not self._host.evict_host(pool, node.pages):
                    self._waiting.popleft()
                    self._state.counters["backup_dropped_no_host_page"] += node.pages
                    continue
                return  # tried again at Released
            self._waiting.popleft()
            self._start(node, pool, pages)

    def _start(self, node: Node, pool: HostPool, pages: Pages) -> None:
        assert node.value is not None
        operation = Write(pool=pool, host_pages=pages, lock=self._state.tree.lock(node))
        node.writing = operation
        message = WritePages(
            self._state.operations.new_id(), pool.storage_id, pool.segment_epoch, pack(node.value), pack(pages)
        )
        self._state.counters["backup_pages"] += node.pages
        self._state.operations.start(operation, message, self._state.workers)

    def written(self, operation: Write) -> None:
        """WriteDone of all ranks: name the pages, unless they are not wanted any more."""
        pool, lock = operation.pool, operation.lock
        storage = self._host.storage_of(pool) if pool is not None else None
        if operation.failed or pool is None or pool.dead or storage is None or lock is None or lock.node is None:
            self.settle(operation)
            return
        nodes = self._state.tree.covered(lock, len(operation.host_pages))
        if any(node.detached for node in nodes):
            self.settle(operation)
            return
        digests = b"".join(digest for node in nodes for digest in self._state.tree.digests(node))
        operation.committing = True
        message = CommitPages(
            self._state.operations.new_id(),
            pool.segment_epoch,
            pack(operation.host_pages),
            digests,
            b"".join(operation.checksums[rank] for rank in sorted(operation.checksums)),
        )
        self._state.operations.start(operation, message, [storage])

    def committed(self, operation: Write) -> None:
        """The host copy is valid: give it to the nodes, send it on to L3, look at their children."""
        pool, lock = operation.pool, operation.lock
        if operation.failed or pool is None or pool.dead or lock is None:
            self.settle(operation)
            return
        nodes = self._state.tree.covered(lock, len(operation.host_pages))
        at = 0
        kept: list[Node] = []
        for node in nodes:
            span = HostSpan(pool, operation.host_pages[at : at + node.pages])
            at += node.pages
            node.writing = None
            if node.detached or node.host is not None:
                self._host.release([span])
            else:
                self._state.tree.set_host(node, span)
                kept.append(node)
        operation.host_pages = operation.host_pages[:0]
        operation.lock = None
        self._state.unlock(lock)
        self._archive(kept, pool)
        for child in [child for node in kept for child in node.children.values()]:
            self.consider(child)

    def _archive(self, nodes: list[Node], pool: HostPool) -> None:
        storage = self._host.storage_of(pool)
        spans = [node.host for node in nodes if node.host is not None]
        if not spans or storage is None or not self.archives:
            return
        pages = np.concatenate([span.pages for span in spans])
        if pool.archiving + len(pages) > max(1, int(pool.total * ARCHIVE_SHARE)):
            self._state.counters["archive_dropped_pages"] += len(pages)
            return
        digests = b"".join(digest for node in nodes for digest in self._state.tree.digests(node))
        self._host.pin(pool, pages)
        pool.archiving += len(pages)
        message = ArchivePages(self._state.operations.new_id(), pool.segment_epoch, pack(pages), digests)
        self._state.operations.start(Archive(pool=pool, host_pages=pages), message, [storage])

    def archived(self, operation: Archive) -> None:
        """The archive has settled, whatever it stored."""
        pool = operation.pool
        if pool is not None and not pool.dead:
            pool.archiving -= len(operation.host_pages)
            self._host.unpin(pool, operation.host_pages)

    def failed(self, operation: Write) -> None:
        """A backup is given up; its device pages stay locked while a worker may read them."""
        if operation.lock is not None and operation.lock.node is not None:
            for node in self._state.tree.covered(operation.lock, len(operation.host_pages)):
                node.writing = None
            if operation.committing:
                lock, operation.lock = operation.lock, None
                self._state.unlock(lock)
        self._state.counters["backup_failed"] += 1

    def settle(self, operation: Write) -> None:
        """Nobody touches the pages any more: unlock and give them back."""
        lock, operation.lock = operation.lock, None
        if lock is not None:
            if lock.node is not None and not operation.failed:
                for node in self._state.tree.covered(lock, len(operation.host_pages)):
                    node.writing = None
            self._state.unlock(lock)
        pool = operation.pool
        if pool is None or pool.dead:
            return
        if operation.committing:
            self._host.release([HostSpan(pool, operation.host_pages)])  # it may have been named
        else:
            self._host.give_back(pool, operation.host_pages)
