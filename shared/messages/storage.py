"""Scheduler <-> storage."""

from typing import Literal

from shared.geometry import PageGeometry
from shared.messages.common import Message, check_digests, check_packed


class BackendInfo(Message):
    """An L3 backend and what it promises."""

    backend_id: str  # equal for two storages that see the same pages
    kind: str  # "hash_file", ... or "none"
    shared: bool  # other instances see its pages
    persistent: bool  # pages survive a restart of the service
    capacity: int  # bytes, 0 = unknown


class SegmentInfo(Message):
    """A host-pool segment, and the range of it that is leased to the receiver."""

    storage_id: str  # identity of the storage
    path: str  # file to map; its name table and lock files lie beside it
    epoch: int  # ns since 1970 at its creation
    pages: int  # pages in the segment, page 0 (the header) included
    first_page: int  # first leased page
    page_count: int  # leased pages
    geometry: PageGeometry  # of its pages
    model_fingerprint: bytes  # 32 bytes
    pages_endpoint: str = ""  # ZeroMQ endpoint that serves its pages to a worker that can't map it; "" = none


class Holder(Message):
    """A process that maps a segment, or has joined its page server."""

    identity: str  # name of the process, kept over restarts
    epoch: int  # ns since 1970
    segment_epoch: int  # ns since 1970
    session: int = 0  # of the page server; 0 = it maps the segment


class StorageHello(Message, tag=True):
    """Storage -> scheduler, first message."""

    identity: str  # unique among storages, kept over restarts
    backend: BackendInfo  # its L3
    segment: SegmentInfo | None  # None until OpenSegment
    holders: list[Holder]  # processes that may still write into any of its segments
    budget: int  # bytes of host memory that segments may take
    credits: int  # operations that may be in flight


class Superseded(Message, tag=True):
    """Storage -> scheduler: another scheduler of your identity has your lease now; exit."""

    epoch: int  # ns since 1970, of the other one


class OpenSegment(Message, tag=True):
    """Scheduler -> storage: make a host pool for this geometry (or say which one there is)."""

    op_id: int  # rises within the scheduler's epoch
    geometry: PageGeometry  # of its pages
    model_fingerprint: bytes  # 32 bytes
    fresh: bool  # True: a new one even if an equal one is open (its writers would not fence)


class SegmentOpened(Message, tag=True):
    """Storage -> scheduler: ack of OpenSegment."""

    op_id: int  # of the OpenSegment
    segment: SegmentInfo  # now open


class PeerExited(Message, tag=True):
    """Storage -> scheduler: the process maps this segment no more (its lock is free): it touches none of its pages."""

    identity: str  # of the process
    epoch: int  # ns since 1970, of the process
    segment_epoch: int  # ns since 1970
    session: int = 0  # that has ended; 0 = it mapped the segment


class CommitPages(Message, tag=True):
    """Scheduler -> storage: name host pages that all ranks have written."""

    op_id: int  # rises within the scheduler's epoch
    segment_epoch: int  # ns since 1970
    pages: bytes  # packed int32
    digests: bytes  # 32 bytes a page
    checksums: bytes  # uint32 CRC32C each: pages x units


class Committed(Message, tag=True):
    """Storage -> scheduler: ack of CommitPages."""

    op_id: int  # of the CommitPages


class ReleasePages(Message, tag=True):
    """Scheduler -> storage: take the names of host pages back. Unnamed pages in the list are ignored."""

    op_id: int  # rises within the scheduler's epoch
    segment_epoch: int  # ns since 1970
    pages: bytes  # packed int32


class Released(Message, tag=True):
    """Storage -> scheduler: ack of ReleasePages."""

    op_id: int  # of the ReleasePages


class ListPages(Message, tag=True):
    """Scheduler -> storage: which pages of this part of a segment have a name? For a new scheduler."""

    op_id: int  # rises within the scheduler's epoch
    segment_epoch: int  # ns since 1970
    first_page: int  # first page of the part
    count: int  # pages in the part


class Inventory(Message, tag=True):
    """Storage -> scheduler: ack of ListPages."""

    op_id: int  # of the ListPages
    pages: bytes  # packed int32, those that have a name, longest unused first
    digests: bytes  # 32 bytes a page

    def __post_init__(self) -> None:
        """Lists that fit."""
        check_digests(self.pages, self.digests)


class AdoptPages(Message, tag=True):
    """Scheduler -> storage: pages of an Inventory are about to be used; have they still these names?"""

    op_id: int  # rises within the scheduler's epoch
    segment_epoch: int  # ns since 1970
    pages: bytes  # packed int32
    digests: bytes  # 32 bytes a page


class Adopted(Message, tag=True):
    """Storage -> scheduler: ack of AdoptPages."""

    op_id: int  # of the AdoptPages
    named: bytes  # packed int32 positions in `pages` that have the name that was given

    def __post_init__(self) -> None:
        """Lists that fit."""
        check_packed(named=self.named)


class PagesDropped(Message, tag=True):
    """Storage -> scheduler: L3 has removed pages for its quota, or has lost them."""

    digests: bytes  # 32 bytes a page


class ChangeBackend(Message, tag=True):
    """Scheduler -> storage: an administrator's wish. Answered by BackendChanged or OperationFailed."""

    op_id: int  # of this command
    change: Literal["attach", "detach", "clear"]  # use L3 again; leave it alone until then; forget all its pages


class BackendChanged(Message, tag=True):
    """Storage -> scheduler: done, or why not."""

    op_id: int  # of the ChangeBackend
    refusal: str  # "" = done


class FindPages(Message, tag=True):
    """Scheduler -> storage: how many leading pages does L3 have?"""

    op_id: int  # rises within the scheduler's epoch
    digests: bytes  # 32 bytes a page
    request_id: str = ""  # of the first Submit that waits for it, for log lines and traces


class Found(Message, tag=True):
    """Storage -> scheduler: answer to FindPages."""

    op_id: int  # of the FindPages
    hits: int  # leading pages


class PrefetchPages(Message, tag=True):
    """Scheduler -> storage: read pages from L3 into host pages and name them."""

    op_id: int  # rises within the scheduler's epoch
    segment_epoch: int  # ns since 1970
    pages: bytes  # packed int32
    digests: bytes  # 32 bytes a page
    request_id: str = ""  # of the first Submit that waits for it, for log lines and traces


class PrefetchProgress(Message, tag=True):
    """Storage -> scheduler: what is named so far."""

    op_id: int  # of the PrefetchPages
    named: bytes  # packed int32 positions in `pages`, all so far

    def __post_init__(self) -> None:
        """Lists that fit."""
        check_packed(named=self.named)


class PrefetchDone(Message, tag=True):
    """Storage -> scheduler: ack of PrefetchPages. Pages that are not named are untouched from here on."""

    op_id: int  # of the PrefetchPages
    named: bytes  # packed int32 positions in `pages`
    corrupt: int  # pages that L3 had and that failed their check
    seconds: float  # duration

    def __post_init__(self) -> None:
        """Lists that fit."""
        check_packed(named=self.named)


class ArchivePages(Message, tag=True):
    """Scheduler -> storage: write named host pages to L3."""

    op_id: int  # rises within the scheduler's epoch
    segment_epoch: int  # ns since 1970
    pages: bytes  # packed int32
    digests: bytes  # 32 bytes a page


class ArchiveDone(Message, tag=True):
    """Storage -> scheduler: ack of ArchivePages."""

    op_id: int  # of the ArchivePages
    stored: bytes  # packed int32 positions in `pages` that L3 has now
    seconds: float  # duration

    def __post_init__(self) -> None:
        """Lists that fit."""
        check_packed(stored=self.stored)
