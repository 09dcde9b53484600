"""The storage's host-pool segments: the open one, replaced ones that are still mapped, and who maps them."""

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path

from services.storage.memory_room import available_memory, memory_limit
from shared.errors import CapacityError, SegmentError
from shared.geometry import PageGeometry
from shared.link import new_epoch
from shared.messages.storage import Holder
from shared.populate import populate
from shared.segment_files import list_holders, remove_stale_segments
from shared.segments import OwnedSegment, create_segment

UNMAP_WAIT_S = 2.0  # a worker that got DropSegment unmaps within milliseconds; a dead one's lock is free at once
UNMAP_POLL_S = 0.05
MAX_REPORTED = 64  # exits told again after a fence: more than the workers that a stack loses within a minute

log = logging.getLogger("kvtide.storage")


class HostPool:
    """All of it belongs to the event loop; only the allocation of memory runs in a thread."""

    def __init__(self, folder: Path, storage_id: str, stack_name: str, budget: int) -> None:
        self.current: OwnedSegment | None = None
        self.budget = budget
        self.exited: list[Holder] = []  # processes that ended and of which the scheduler hasn't heard
        self.reported: deque[Holder] = deque(maxlen=MAX_REPORTED)  # of which it was told; the message may be lost
        self.remote_holders: Callable[[], list[Holder]] = list  # processes that use a segment without mapping it
        self._folder = folder
        self._storage_id = storage_id
        self._stack = stack_name
        self._replaced: list[OwnedSegment] = []
        self._stale: dict[int, int] = {}  # epoch: bytes, of earlier processes of this storage
        self._held: set[Holder] = set()
        self._opening = asyncio.Lock()

    def start(self) -> None:
        """Remove what earlier processes of this storage left.

        Raises CapacityError when the budget can never be met here, SegmentError when such a process still runs.
        """
        try:
            room = os.statvfs(self._folder)
        except OSError as error:
            raise SegmentError(
                f"storage.segment_folder {self._folder}: {error.strerror}; it must be a folder in memory"
            ) from None
        limits = {str(self._folder): room.f_blocks * room.f_frsize, "the container": memory_limit()}
        for what, limit in limits.items():
            if limit is not None and self.budget > limit:
                raise CapacityError(
                    f"cache.host_bytes is {self.budget} and {what} can have {limit} bytes: lower it, or give more"
                )
        self._stale = {
            each.epoch: each.size for each in remove_stale_segments(self._folder, self._stack, self._storage_id)
        }

    async def open(
        self, geometry: PageGeometry, model_fingerprint: bytes, *, fresh: bool, quiesce: Callable[[], Awaitable[None]]
    ) -> OwnedSegment:
        """The open segment if it is for this model and needn't be `fresh`, else a new one in its place.

        `quiesce` is awaited before the open one is given up: it ends every operation on it.

        Raises CapacityError when the memory for it isn't there, such as while replaced segments are still mapped.
        """
        async with self._opening:
            current = self.current
            wanted = (geometry, model_fingerprint)
            if current is not None and not fresh and (current.geometry, current.model_fingerprint) == wanted:
                return current
            pages = self.budget // geometry.page_bytes
            await self._wait_for_room(pages * geometry.page_bytes)
            await quiesce()
            if current is not None:
                self._replaced.append(current)
                self.current = None
                current.unlink()
            self.scan()  # closes what nobody maps, so that its memory is free
            if pages * geometry.page_bytes > available_memory():
                raise CapacityError(
                    f"the host pool needs {pages * geometry.page_bytes} bytes and {available_memory()} are available: "
                    "lower cache.host_bytes"
                )
            start_s = time.monotonic()
            segment = await asyncio.to_thread(
                create_segment,
                self._folder,
                self._storage_id,
                self._stack,
                new_epoch(),
                geometry,
                model_fingerprint,
                pages,
            )
            log.info(
                "segment_opened epoch=%d pages=%d bytes=%d seconds=%.2f",
                segment.epoch, pages, segment.size, time.monotonic() - start_s,
            )  # fmt: skip
            populate(lambda: segment.pages_array)
            self.current = segment
            return segment

    def scan(self) -> list[Holder]:
        """Look who maps any segment now. Those that ended since go to `exited`."""
        held, exited = list_holders(self._folder, self._stack, self._storage_id)
        epochs = {segment.epoch for segment in (*self._replaced, self.current) if segment is not None}
        held += [holder for holder in self.remote_holders() if holder.segment_epoch in epochs]
        gone = self._held.difference(held)
        self.exited += sorted(gone.union(exited), key=lambda holder: (holder.segment_epoch, holder.identity))
        self._held = set(held)
        epochs = {holder.segment_epoch for holder in held}
        self._stale = {epoch: size for epoch, size in self._stale.items() if epoch in epochs}
        for segment in self._replaced:
            if segment.epoch not in epochs:
                segment.close()
        self._replaced = [segment for segment in self._replaced if segment.epoch in epochs]
        return held

    def report_again(self) -> None:
        """A scheduler has fenced: what it was told over a dying link may never have come."""
        self.exited = [holder for holder in self.reported if holder not in self._held] + self.exited
        self.reported.clear()

    def close(self) -> None:
        """Unlink every segment; workers keep what they have mapped."""
        segments = [*self._replaced, self.current] if self.current else self._replaced
        for segment in segments:
            segment.unlink()
            segment.close()
        self.current, self._replaced = None, []
        self.scan()  # removes the lock files of the dead

    async def _wait_for_room(self, size: int) -> None:
        """Wait until the budget has room for `size` beside what others map of earlier segments."""
        deadline_s = time.monotonic() + UNMAP_WAIT_S
        while (mapped := self._mapped_bytes()) + size > self.budget:
            if time.monotonic() > deadline_s:
                raise CapacityError(
                    f"a new host pool needs {size} bytes, {mapped} of earlier ones are still mapped, and "
                    f"cache.host_bytes is {self.budget}: the workers must drop them first"
                )
            await asyncio.sleep(UNMAP_POLL_S)

    def _mapped_bytes(self) -> int:
        epochs = {holder.segment_epoch for holder in self.scan()}
        segments = [*self._replaced, self.current] if self.current else self._replaced
        return sum(each.size for each in segments if each.epoch in epochs) + sum(self._stale.values())
