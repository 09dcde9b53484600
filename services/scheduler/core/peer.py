"""What is known of one worker or storage process, and who hears of the changes."""

from dataclasses import dataclass, field
from typing import Protocol

from services.scheduler.core.events import PeerKey
from shared.messages.storage import SegmentInfo, StorageHello
from shared.messages.worker import WorkerHello


class Listener(Protocol):
    """What the core does when the topology changes."""

    def group_ready(self, hellos: list[WorkerHello]) -> None:
        """All ranks are there and have fenced."""

    def group_withdrawn(self) -> None:
        """A rank is missing."""

    def worker_replaced(self, old: PeerKey) -> None:
        """A rank has a new process: the device pool of the old one is gone."""

    def storage_replaced(self, old: PeerKey) -> None:
        """A storage has a new process: the segment of the old one is gone."""

    def storage_lost(self, key: PeerKey) -> None:
        """A storage is silent, or must fence before it is used again."""

    def pool_ready(
        self, storage: PeerKey, hello: StorageHello, segment: SegmentInfo, named: list[tuple[int, bytes]]
    ) -> None:
        """A storage's segment is ours and every rank maps it; `named` pages have a digest since before our time."""

    def fenced(self, peer: PeerKey, op_id: int) -> None:
        """The process touches no page for operations before `op_id`."""


@dataclass(eq=False)
class WorkerPeer:
    """One rank's process."""

    key: PeerKey
    hello: WorkerHello
    up: bool = True
    fenced: bool = False
    mapping: set[int] = field(default_factory=set)  # segment epochs whose MapSegment is sent
    mapped: dict[int, int] = field(default_factory=dict)  # segment epoch -> session; 0 = shared memory


@dataclass(eq=False)
class StoragePeer:
    """One storage process."""

    key: PeerKey
    hello: StorageHello
    up: bool = True
    lost_at: float = 0.0  # when it fell silent, if not `up`
    tainted: bool = False  # it was forgotten, so its segment may be written for operations that are forgotten too
    fenced: bool = False
    holders: set[tuple[PeerKey, int]] = field(default_factory=set)  # who maps which of its segments
    fenced_holders: set[PeerKey] = field(default_factory=set)  # those that have fenced to us
    dropping: set[tuple[PeerKey, int]] = field(default_factory=set)  # whose DropSegment is sent
    segment: SegmentInfo | None = None  # open, and of our geometry
    released: bool = False  # every page of it is ours to give, or is in `named`
    named: list[tuple[int, bytes]] = field(default_factory=list)  # pages of an earlier scheduler, with their digests
    listed_to: int = 0  # pages before this one have been asked for
    opening: bool = False
    retry_at: float = float("inf")  # a silent writer's or a refused segment's deadline

    @property
    def writers(self) -> set[PeerKey]:
        """Holders that may still write for an earlier scheduler."""
        return {key for key, _ in self.holders} - self.fenced_holders
