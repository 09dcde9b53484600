"""The host pools that this worker maps, by storage and epoch."""

from shared.errors import GeometryError, SegmentError
from shared.geometry import PageGeometry
from shared.messages.storage import SegmentInfo
from shared.segments import MappedSegment, map_segment


class Segments:
    """A segment is usable from `map` until `take`; what is taken is closed by the taker, once no copy uses it."""

    def __init__(self, geometry: PageGeometry, fingerprint: bytes, identity: str, epoch: int) -> None:
        """identity and epoch: of this process, by which the storage knows it."""
        self._geometry = geometry
        self._fingerprint = fingerprint
        self._identity = identity
        self._epoch = epoch
        self._mapped: dict[tuple[str, int], MappedSegment] = {}

    def map(self, info: SegmentInfo) -> None:
        """Map a segment, once. Raises GeometryError for another model's pages, SegmentError when it can't be mapped."""
        if info.geometry != self._geometry or info.model_fingerprint != self._fingerprint:
            raise GeometryError(
                f"the segment of {info.storage_id} is for {info.geometry} of {info.model_fingerprint.hex()[:12]}, "
                f"this worker's pages are {self._geometry} of {self._fingerprint.hex()[:12]}: open one for this model"
            )
        key = (info.storage_id, info.epoch)
        if key not in self._mapped:
            self._mapped[key] = map_segment(info, self._identity, self._epoch)

    def find(self, storage_id: str, epoch: int) -> MappedSegment:
        """The segment. Raises SegmentError when it isn't mapped."""
        try:
            return self._mapped[storage_id, epoch]
        except KeyError:
            known = ", ".join(f"{name}@{number}" for name, number in self._mapped) or "none"
            raise SegmentError(f"segment {storage_id}@{epoch} is not mapped (mapped: {known}); map it first") from None

    def take(self, storage_id: str, epoch: int) -> MappedSegment | None:
        """Give the segment up: nothing finds it any more. None when it isn't mapped."""
        return self._mapped.pop((storage_id, epoch), None)

    def close(self) -> None:
        """Unmap all."""
        for segment in self._mapped.values():
            segment.close()
        self._mapped.clear()
