"""A node of the radix tree."""

from typing import TYPE_CHECKING, NamedTuple

from services.scheduler.core.leaves import Entry
from services.scheduler.core.pages import HostPool, Pages

if TYPE_CHECKING:
    from services.scheduler.core.operations import Load, Write


class HostSpan(NamedTuple):
    """Where a node's pages lie in host memory."""

    pool: HostPool
    pages: Pages  # one for each page of the node


class Node:
    """A span of whole pages of one token sequence (TREE-01)."""

    __slots__ = (
        "backed_children",
        "children",
        "created",
        "detached",
        "device_entry",
        "device_share_entry",
        "digests",
        "frequencies",
        "hit_count",
        "host",
        "host_entry",
        "host_share_entry",
        "key",
        "last_access",
        "loading",
        "lock_ref",
        "pages",
        "parent",
        "priority",
        "seed",
        "shed",
        "unwritable",
        "value",
        "valued_children",
        "writing",
    )

    def __init__(self, key: bytes, pages: int, parent: "Node | None", clock: int) -> None:
        self.key = key  # packed int32 tokens
        self.pages = pages  # number of pages
        self.parent = parent
        self.children: dict[bytes, Node] = {}  # by the first page's tokens
        self.value: Pages | None = None  # device pages; None = evicted
        self.host: HostSpan | None = None  # None = not backed up
        self.lock_ref = 0
        self.hit_count = 0
        self.shed = False  # its host copy went while it was on the device: not backed up again before its next hit
        self.created = clock
        self.last_access: int = clock
        self.priority = 0
        self.digests: list[bytes] | None = None
        self.frequencies = b""  # of its pages, for eviction "auto"; empty = each was used once
        self.seed = b""  # of a root: what stands in for the first page's parent digest
        self.writing: Write | None = None  # a backup is in flight
        self.loading: Load | None = None  # `value` is being filled
        self.unwritable = False  # its backup before an eviction has failed: it goes without
        self.valued_children = 0
        self.backed_children = 0
        self.detached = False  # out of the tree; alive only for its locks
        self.device_entry: Entry | None = None  # its place among the evictable device leaves
        self.host_entry: Entry | None = None  # the same for host leaves
        self.device_share_entry: Entry | None = None  # its place among those of its namespace: see `shares.py`
        self.host_share_entry: Entry | None = None

    @property
    def is_root(self) -> bool:
        """Roots hold no pages; there is one for each namespace."""
        return not self.key

    @property
    def evicted(self) -> bool:
        """No device pages."""
        return self.value is None

    @property
    def backuped(self) -> bool:
        """Host pages are valid."""
        return self.host is not None
