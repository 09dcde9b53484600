"""write_backup: device -> host -> L3 (TIER-01..03, STORE-05)."""

from collections import deque
from collections.abc import Iterable
from enum import Enum

from services.scheduler.core.ghosts import Fate
from services.scheduler.core.host_memory import HostMemory
from services.scheduler.core.leaves import device_evictable
from services.scheduler.core.node import HostSpan, Node
from services.scheduler.core.operations import Write
from services.scheduler.core.pages import HostPool, Pages
from services.scheduler.core.settings import MAX_WAITING_BACKUPS, WRITE_THRESHOLDS
from services.scheduler.core.state import State
from shared.messages.storage import CommitPages
from shared.messages.worker import WritePages
from shared.packed import pack

FOR_BACKUP = Fate("evicted", "write_backup")


class WriteBack(Enum):
    """What came of the wish to back a leaf up before its eviction."""

    STARTED = "started"  # its pages come free at its Committed
    WAITS = "waits"  # for host pages that are on their way
    IMPOSSIBLE = "impossible"  # it is evicted without a copy


class Backup:
    """Decides what is backed up, and follows each backup to its end."""

    def __init__(self, state: State, host: HostMemory) -> None:
        self._state = state
        self._host = host
        self._waiting: deque[Node] = deque()

    def count_hits(self, nodes: Iterable[Node], first: int) -> None:
        """Count a request's use of the nodes of its path that begin at page `first` or later, each once."""
        at = 0
        for node in nodes:
            if at >= first:
                node.hit_count += 1
                node.shed = False
            at += node.pages
            self.consider(node)

    def consider(self, node: Node) -> None:
        """write_backup of a node if the policy wants it and its parent is backed up (TIER-02)."""
        threshold = WRITE_THRESHOLDS.get(self._state.settings.write_policy)
        if threshold is None or node.is_root or node.hit_count < threshold or node.value is None or node.detached:
            return
        if node.host is not None or node.writing is not None or node.loading is not None or node.shed:
            return
        parent = node.parent
        if parent is None or not (parent.is_root or parent.host is not None) or not self._state.ready:
            return
        pool = self._pool_for(node)
        if pool is None:
            return
        pages = pool.alloc(node.pages) if not self._waiting else None
        if pages is not None:
            self._start(node, pool, pages)
        elif len(self._waiting) < MAX_WAITING_BACKUPS and node not in self._waiting:
            self._waiting.append(node)
            self._state.space_freed = True
        else:
            self._dropped(node, "waiting")

    def passed_over(self, node: Node, pages: int) -> None:
        """The last pages of a leaf are evicted, and host memory never had them: the policy wanted no copy so far."""
        threshold = WRITE_THRESHOLDS.get(self._state.settings.write_policy, 0)
        if self._state.settings.explain and node.hit_count < threshold and not node.shed:
            digests = self._state.tree.digests(node)[-pages:]
            self._state.ghosts.note("host", digests, "not_admitted", "write_policy")

    def _dropped(self, node: Node, bound: str) -> None:
        self._state.counters[f"backup_dropped_{bound}"] += node.pages
        self._state.ghosts.note("host", self._state.tree.digests(node), "dropped", bound)

    def retry(self) -> None:
        """Start waiting backups as far as host pages are free, and evict for the next."""
        while self._waiting and self._state.ready:
            node = self._waiting[0]
            pool = self._pool_for(node)
            if pool is None:
                return
            if node.value is None or node.detached or node.host is not None or node.writing is not None:
                self._waiting.popleft()
                continue
            pages = pool.alloc(node.pages)
            if pages is None:
                if node.pages > pool.total or not self._host.evict_host(pool, node.pages, FOR_BACKUP):
                    self._waiting.popleft()
                    self._dropped(node, "no_host_page")
                    continue
                return  # tried again at Released
            self._waiting.popleft()
            self._start(node, pool, pages)

    def _pool_for(self, node: Node) -> HostPool | None:
        above = node.parent.host if node.parent is not None else None
        return self._host.pool_for(node.pages, above.pool if above is not None else None)

    def write_back(self, node: Node) -> WriteBack:
        """Back up an unlocked device leaf so that it can be evicted at its Committed (TIER-04)."""
        if self._state.settings.write_policy != "write_back" or node.unwritable or not self._state.ready:
            return WriteBack.IMPOSSIBLE
        pool = self._pool_for(node)
        if pool is None:
            return WriteBack.IMPOSSIBLE
        pages = pool.alloc(node.pages)
        if pages is not None:
            self._start(node, pool, pages, evicts=True)
            self._state.counters["write_back_pages"] += node.pages
            return WriteBack.STARTED
        if node.pages <= pool.total and self._host.evict_host(pool, node.pages, FOR_BACKUP):
            self._state.counters["write_back_waited"] += 1
            return WriteBack.WAITS
        self._dropped(node, "no_host_page")
        return WriteBack.IMPOSSIBLE

    def evicting(self) -> int:
        """Device pages that come free at the Committed of a backup, if nobody uses them meanwhile."""
        if self._state.settings.write_policy != "write_back":
            return 0
        return sum(len(operation.host_pages) for operation in self._state.operations.live(Write) if operation.evicts)

    def _evict(self, nodes: list[Node], operation: Write) -> None:
        """Take the device pages of nodes that are backed up now, unless they were used after the backup's start."""
        with self._state.ghosts.because(operation.fate):
            for node in reversed(nodes):
                if device_evictable(node) and node.last_access <= operation.clock:
                    self._state.counters["device_evicted_pages"] += node.pages
                    self._state.device.free(self._state.tree.drop_value(node))

    def _start(self, node: Node, pool: HostPool, pages: Pages, *, evicts: bool = False) -> None:
        assert node.value is not None
        tree = self._state.tree
        operation = Write(pool, pages, tree.lock(node))
        operation.evicts, operation.fate, operation.clock = evicts, self._state.ghosts.current, tree.clock
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
            _by_page(operation.checksums, len(operation.host_pages)),
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
        if operation.evicts:
            self._evict(kept, operation)
        else:
            self._host.archiver.start(kept)
        for child in [child for node in kept for child in node.children.values()]:
            self.consider(child)

    def failed(self, operation: Write) -> None:
        """A backup is given up; its device pages stay locked while a worker may read them."""
        if operation.lock is not None and operation.lock.node is not None:
            for node in self._state.tree.covered(operation.lock, len(operation.host_pages)):
                node.writing = None
                node.unwritable = node.unwritable or operation.evicts
                self._state.ghosts.note("host", self._state.tree.digests(node), "failed", "write_backup")
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


def _by_page(checksums: dict[int, bytes], pages: int) -> bytes:
    """The checksums of all ranks, page after page: in a host page the ranks' parts lie side by side."""
    parts = [checksums[rank] for rank in sorted(checksums)]
    if len(parts) == 1:
        return parts[0]
    sizes = [len(part) // pages for part in parts]
    return b"".join(
        part[page * size : (page + 1) * size] for page in range(pages) for part, size in zip(parts, sizes, strict=True)
    )
