"""The contract of an L3 backend: what it promises, and when a result is safe to use.

A `Backend` is one store; `of_model` gives the part of it that one model may see (the key of a page is model
fingerprint and digest). A page that can't be read or written is a miss. A batch of a store that is lost as a whole
may raise StoreLostError; `breaker` makes misses of that too, and a service sees every backend through it.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from shared.errors import StorageError
from shared.geometry import PageGeometry
from shared.messages.storage import BackendInfo
from shared.segments import Checksums

MAX_BATCH = 128  # pages in one call: what a store that batches its round trips takes at once


class StoreLostError(StorageError):
    """The store can't be reached or didn't answer in time; it may come back."""


class BatchRead(NamedTuple):
    """Result of `batch_get`."""

    checksums: list[Checksums | None]  # uint32 [units] of each page that is in its buffer, None for a miss
    corrupt: int  # misses whose page was there and failed its check
    failed: int = 0  # misses because the store couldn't read


class ModelPages(ABC):
    """The pages of one model. `stop`, once set, turns pages that haven't begun into misses."""

    @abstractmethod
    async def batch_exists(self, digests: Sequence[bytes]) -> int:
        """Number of leading digests that the store has. It may be out of date by the time of `batch_get`."""

    @abstractmethod
    async def batch_get(
        self, digests: Sequence[bytes], buffers: Sequence[memoryview], stop: threading.Event
    ) -> BatchRead:
        """Read pages into `buffers`, page_bytes each, and check their content against the checksums stored with it.

        When it returns, no thread writes into a buffer any more. A missed page's buffer may hold anything.
        """

    @abstractmethod
    async def batch_set(
        self,
        digests: Sequence[bytes],
        buffers: Sequence[memoryview],
        checksums: Sequence[Checksums],
        stop: threading.Event,
    ) -> list[bool]:
        """Store pages with their checksums; True where the store has the page now, be it from before.

        The caller keeps the buffers unchanged until it returns; then no thread reads them any more.
        """

    @abstractmethod
    async def remove(self, digests: Sequence[bytes]) -> int:
        """Forget pages; returns how many there were."""

    def holds(self, digest: bytes) -> bool:
        """Is a page that was stored there still? True where only the store itself could tell."""
        return True

    def take_dropped(self) -> list[bytes]:
        """Digests of pages that the store has lost since the last call, to its quota too; a store may not know."""
        return []


class Backend(ABC):
    """One store."""

    @abstractmethod
    async def start(self) -> None:
        """Make the store usable. Raises StoreLostError when that may work later, else StorageError."""

    @property
    @abstractmethod
    def info(self) -> BackendInfo:
        """Identity and promises; known after `start`."""

    @abstractmethod
    async def of_model(self, model_fingerprint: bytes, geometry: PageGeometry) -> ModelPages:
        """The pages of one model. Raises StorageError when the store holds another one under its key."""

    @abstractmethod
    async def refresh(self) -> None:
        """Look for what other instances stored or removed; called every REFRESH_S.

        A store that was lost is reached again here: StoreLostError says that it wasn't.
        """

    @abstractmethod
    async def clear(self) -> None:
        """Forget every page of every model."""

    async def attach(self) -> None:
        """Use the store again that `detach` has left alone. Raises StorageError when it doesn't answer."""
        raise StorageError("storage.backend is none: there is nothing to attach")

    def detach(self) -> None:
        """Leave the store alone until `attach`. Raises StorageError when there is none."""
        raise StorageError("storage.backend is none: there is nothing to detach")

    @abstractmethod
    def stats(self) -> dict[str, float]:
        """Numbers for status and metrics, named l3_*."""

    @abstractmethod
    async def close(self) -> None:
        """Give everything up. Reads and writes that hang in a device are left behind."""


REFRESH_S = 2.0  # two rounds and a slow scan stay below the 5 s in which another instance's pages must be seen


def check_batch(digests: Sequence[bytes], *others: Sequence[object]) -> None:
    """Raises ValueError when a batch is too long or its lists differ in length."""
    if len(digests) > MAX_BATCH or any(len(other) != len(digests) for other in others):
        lengths = [len(digests), *map(len, others)]
        raise ValueError(f"a batch has lists of one length, at most {MAX_BATCH}, not {lengths}")
