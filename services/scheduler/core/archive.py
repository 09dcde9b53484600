"""Host pages -> L3 (STORE-05): at Committed, or in write_back when the host tier evicts them."""

from typing import TYPE_CHECKING

import numpy as np

from services.scheduler.core.events import BlockStored, Medium
from services.scheduler.core.node import Node
from services.scheduler.core.operations import Archive
from services.scheduler.core.pages import HostPool, some
from services.scheduler.core.publish import parent_digest
from services.scheduler.core.settings import ARCHIVE_SHARE
from services.scheduler.core.state import State
from shared.messages.storage import ArchivePages
from shared.packed import pack, unpack_list

if TYPE_CHECKING:
    from services.scheduler.core.host_memory import HostMemory


ON_DISK = ("hash_file", "file")  # kinds of L3 whose pages are this machine's files


class Archiver:
    """Pins what it sends to L3. A page is sent once: afterwards L3 has it, or had its chance."""

    def __init__(self, state: State, host: "HostMemory") -> None:
        self._state = state
        self._host = host

    def wants(self, node: Node) -> bool:
        """Has the node a page that L3 was never asked to store?"""
        span = node.host
        return span is not None and span.pool.backend is not None and some(~span.pool.archived[span.pages])

    def start(self, nodes: list[Node]) -> bool:
        """Archive the host pages of `nodes`, all of one pool. False (counted) beyond the share that may be pinned."""
        spans = [node.host for node in nodes if node.host is not None]
        pool = spans[0].pool if spans else None
        storage = self._host.storage_of(pool) if pool is not None else None
        if pool is None or storage is None or pool.backend is None:
            return False
        pages = np.concatenate([span.pages for span in spans])
        digests = [digest for node in nodes for digest in self._state.tree.digests(node)]
        if not self._has_room(pool, len(pages)):
            self._state.counters["archive_dropped_pages"] += len(pages)
            self._state.ghosts.note("storage", digests, "dropped", "archive_queue")
            return False
        pool.pin(pages)
        pool.archiving += len(pages)
        message = ArchivePages(self._state.operations.new_id(), pool.segment_epoch, pack(pages), b"".join(digests))
        operation = Archive(pool, pages)
        operation.digests = digests
        if self._state.published is not None:
            medium: Medium = "DISK" if pool.backend.kind in ON_DISK else "EXTERNAL"
            digests_of = self._state.tree.digests
            operation.blocks = [BlockStored(digests_of(node), parent_digest(node), node.key, medium) for node in nodes]
        self._state.operations.start(operation, message, [storage])
        return True

    def _has_room(self, pool: HostPool, pages: int) -> bool:
        return pool.archiving + pages <= max(1, int(pool.total * ARCHIVE_SHARE))

    def dropped(self, digests: list[bytes]) -> None:
        """L3 has lost pages. An archive's answer that comes later may be older: one that was lost is sent again."""
        self._state.ghosts.left_storage(digests)
        if self._state.published is not None:
            self._state.published.dropped(digests)
        for operation in self._state.operations.live(Archive):
            operation.dropped.update(set(digests).intersection(operation.digests))

    def ended(self, operation: Archive, stored: bytes = b"") -> None:
        """The archive has settled, whatever it stored: packed positions."""
        gone = {at for at, digest in enumerate(operation.digests) if digest in operation.dropped}
        positions = set(unpack_list(stored)) - gone
        kept = [digest for at, digest in enumerate(operation.digests) if at in positions]
        lost = [digest for at, digest in enumerate(operation.digests) if at not in positions | gone]
        self._state.ghosts.note("storage", kept, "stored")
        self._state.ghosts.note("storage", lost, "dropped", "not_stored")
        if self._state.published is not None and operation.blocks:
            self._state.published.archived(operation.blocks, positions)
        pool = operation.pool
        if pool is not None and not pool.dead:
            pool.archiving -= len(operation.host_pages)
            pool.archived[operation.host_pages] = True
            self._host.unpin(pool, operation.host_pages)
