"""No L3: nothing exists, nothing is kept."""

import threading
from collections.abc import Sequence

from services.storage.backend import Backend, BatchRead, ModelPages, check_batch
from shared.geometry import PageGeometry
from shared.messages.storage import BackendInfo
from shared.segments import Checksums


class NoPages(ModelPages):
    """Every page is a miss."""

    async def batch_exists(self, digests: Sequence[bytes]) -> int:
        check_batch(digests)
        return 0

    async def batch_get(
        self, digests: Sequence[bytes], buffers: Sequence[memoryview], stop: threading.Event
    ) -> BatchRead:
        check_batch(digests, buffers)
        return BatchRead([None] * len(digests), 0)

    async def batch_set(
        self,
        digests: Sequence[bytes],
        buffers: Sequence[memoryview],
        checksums: Sequence[Checksums],
        stop: threading.Event,
    ) -> list[bool]:
        check_batch(digests, buffers, checksums)
        return [False] * len(digests)

    async def remove(self, digests: Sequence[bytes]) -> int:
        return 0


class NoneBackend(Backend):
    """storage.backend = "none"."""

    async def start(self) -> None:
        pass

    @property
    def info(self) -> BackendInfo:
        return BackendInfo("none", "none", shared=False, persistent=False, capacity=0)

    async def of_model(self, model_fingerprint: bytes, geometry: PageGeometry) -> ModelPages:
        return NoPages()

    async def refresh(self) -> None:
        pass

    async def clear(self) -> None:
        pass

    def stats(self) -> dict[str, float]:
        return {}

    async def close(self) -> None:
        pass
