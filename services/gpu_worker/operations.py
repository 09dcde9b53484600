"""Commands that occupy a stream, from their arrival until their answer."""

import threading
from collections.abc import Sequence

import numpy as np

from services.gpu_worker.host_segment import HostSegment, PageIds
from services.gpu_worker.streams import Event
from shared.errors import KvtideError, ProtocolError
from shared.messages.worker import LoadPages, RunStep, WritePages
from shared.packed import unpack
from shared.page_hash import DIGEST_BYTES


class OperationCancelled(KvtideError):
    """The operation was told to stop before it was done."""


class LoadFailed(KvtideError):
    """Loads that ended, or will, before all of their layers are in."""

    def __init__(self, message: str, op_ids: Sequence[int]) -> None:
        super().__init__(message)
        self.op_ids = op_ids


class Operation:
    """Either it begins, on its stream's thread, or it is cancelled before that and never touches a page."""

    def __init__(self, op_id: int, epoch: int) -> None:
        self.op_id = op_id
        self.epoch = epoch  # of the scheduler that sent it
        self._lock = threading.Lock()
        self._begun = False
        self._cancelled = False

    def begin(self) -> bool:
        """Called by the stream. False when it was cancelled: then there is nothing to do and nothing to answer."""
        with self._lock:
            self._begun = not self._cancelled
            return self._begun

    def cancel(self) -> bool:
        """Ask it to stop. True when it had not begun, so that it has ended here and now."""
        with self._lock:
            self._cancelled = True
            if self._begun:
                return False
        self._abandon()
        return True

    def check(self) -> None:
        """Raises OperationCancelled once `cancel` was called. Copies call it between batches."""
        if self._cancelled:
            raise OperationCancelled(f"operation {self.op_id} was cancelled")

    def _abandon(self) -> None:
        """It will never begin: settle the events that others may wait for."""


class Step(Operation):
    """A forward pass."""

    def __init__(
        self, command: RunStep, epoch: int, loads: Sequence["Load"], lost: Sequence[int], begun: Event, ended: Event
    ) -> None:
        """loads: those in `wait_for` that still run. lost: op_ids in `wait_for` that have failed or were never seen."""
        super().__init__(command.op_id, epoch)
        self.command = command
        self.loads = loads
        self.lost = lost
        self.begun = begun  # `written` is known
        self.ended = ended  # the pages in `written` hold their bytes, or the step's error
        self.written: PageIds = np.empty(0, dtype=np.int64)

    def _abandon(self) -> None:
        self.begun.record()
        self.ended.record()


class Write(Operation):
    """Device pages into host pages."""

    def __init__(
        self, command: WritePages, epoch: int, segment: HostSegment, pool_pages: int, steps: Sequence[Step]
    ) -> None:
        """pool_pages: of the device pool. steps: those that came before it and haven't ended.

        Raises ProtocolError for page lists that don't pair or pages that don't exist.
        """
        super().__init__(command.op_id, epoch)
        self.segment = segment
        self.steps = steps
        self.device_pages = _pages(command.device_pages, pool_pages)
        self.host_pages = _pages(command.host_pages, segment.pages)
        _check_pairs(self.device_pages, self.host_pages)


class Load(Operation):
    """Host pages into device pages, with an event per layer."""

    def __init__(
        self, command: LoadPages, epoch: int, segment: HostSegment, pool_pages: int, layers: Sequence[Event]
    ) -> None:
        """layers: an event for each. Raises ProtocolError for lists that don't pair or pages that don't exist."""
        super().__init__(command.op_id, epoch)
        self.segment = segment
        self.layers = layers
        self.failed = False
        self.device_pages = _pages(command.device_pages, pool_pages)
        self.host_pages = _pages(command.host_pages, segment.pages)
        _check_pairs(self.device_pages, self.host_pages)
        if len(command.digests) != DIGEST_BYTES * len(self.host_pages):
            raise ProtocolError(f"{len(command.digests)} bytes of digests for {len(self.host_pages)} pages")
        self.digests = [
            command.digests[start : start + DIGEST_BYTES] for start in range(0, len(command.digests), DIGEST_BYTES)
        ]

    def fail(self, reason: str) -> None:
        """Let those fail who wait for a layer that isn't in yet."""
        self.failed = True
        for event in self.layers:
            event.set_error(LoadFailed(f"load {self.op_id} failed: {reason}", [self.op_id]))

    def _abandon(self) -> None:
        self.fail("cancelled")


def _pages(packed: bytes, limit: int) -> PageIds:
    """Page 0 is padding on the device and the header on the host: it is never copied."""
    pages = unpack(packed).astype(np.int64)
    if len(pages) and (pages.min() < 1 or pages.max() >= limit):
        raise ProtocolError(f"page {pages.min()} or {pages.max()} is outside 1..{limit - 1}")
    return pages


def _check_pairs(device_pages: PageIds, host_pages: PageIds) -> None:
    if len(device_pages) != len(host_pages) or not len(device_pages):
        raise ProtocolError(f"{len(device_pages)} device pages and {len(host_pages)} host pages don't pair")
