"""The host pools that this worker maps or has joined, by storage and epoch."""

import logging
from collections.abc import Callable

from services.gpu_worker.host_segment import HostSegment, MappedHostSegment
from services.gpu_worker.remote_segment import RemoteSegment
from shared.config import HostPath
from shared.errors import GeometryError, SegmentError
from shared.geometry import PageGeometry
from shared.messages.storage import SegmentInfo

log = logging.getLogger("kvtide.segments")


class Segments:
    """A segment is usable from `map` until `take`; what is taken is closed by the taker, once no copy uses it."""

    def __init__(
        self,
        geometry: PageGeometry,
        fingerprint: bytes,
        identity: str,
        epoch: int,
        host_path: HostPath,
        on_lost: Callable[[], None],
    ) -> None:
        """identity and epoch: of this process, by which the storage knows it. on_lost: called when `usable` shrinks
        because a storage has ended a session."""
        self._geometry = geometry
        self._fingerprint = fingerprint
        self._identity = identity
        self._epoch = epoch
        self._host_path = host_path
        self._on_lost = on_lost
        self._mapped: dict[tuple[str, int], HostSegment] = {}

    def map(self, info: SegmentInfo) -> HostSegment:
        """Map a segment, once; a remote one is to be joined before it is used.

        Raises GeometryError for another model's pages, SegmentError when there is no way to them.
        """
        if info.geometry != self._geometry or info.model_fingerprint != self._fingerprint:
            raise GeometryError(
                f"the segment of {info.storage_id} is for {info.geometry} of {info.model_fingerprint.hex()[:12]}, "
                f"this worker's pages are {self._geometry} of {self._fingerprint.hex()[:12]}: open one for this model"
            )
        key = (info.storage_id, info.epoch)
        if key not in self._mapped:
            self._mapped[key] = self._reach(info)
        return self._mapped[key]

    def _reach(self, info: SegmentInfo) -> HostSegment:
        if self._host_path != "remote":
            try:
                return MappedHostSegment(info, self._identity, self._epoch)
            except SegmentError as error:
                if self._host_path == "map" or not info.pages_endpoint:
                    raise
                log.info("not_mapped storage=%s remote=%s reason=%s", info.storage_id, info.pages_endpoint, error)
        if not info.pages_endpoint:
            raise SegmentError(
                f"worker.host_path is remote and {info.storage_id} has no storage.pages_endpoint: set it"
            )
        self._close_lost(info.storage_id)
        return RemoteSegment(info, self._identity, self._epoch, self._on_lost)

    def _close_lost(self, storage_id: str) -> None:
        """Close what an earlier process of the storage served: it knows no session of ours to have dropped."""
        for key, segment in list(self._mapped.items()):
            if key[0] == storage_id and isinstance(segment, RemoteSegment) and segment.lost:
                self._mapped.pop(key).close()

    def usable(self) -> list[int]:
        """Epochs of the segments that copies can use now."""
        return [
            epoch
            for (_, epoch), segment in self._mapped.items()
            if not (isinstance(segment, RemoteSegment) and segment.lost)
        ]

    def find(self, storage_id: str, epoch: int) -> HostSegment:
        """The segment. Raises SegmentError when it isn't mapped."""
        try:
            return self._mapped[storage_id, epoch]
        except KeyError:
            known = ", ".join(f"{name}@{number}" for name, number in self._mapped) or "none"
            raise SegmentError(f"segment {storage_id}@{epoch} is not mapped (mapped: {known}); map it first") from None

    def take(self, storage_id: str, epoch: int) -> HostSegment | None:
        """Give the segment up: nothing finds it any more. None when it isn't mapped."""
        return self._mapped.pop((storage_id, epoch), None)

    def close(self) -> None:
        """Unmap all."""
        for segment in self._mapped.values():
            segment.close()
        self._mapped.clear()
