"""Values in this process's own memory, for tests and for a stack without a disk."""

from collections import OrderedDict
from collections.abc import Sequence

from services.storage.key_value import KeyValueStore


class MemoryStore(KeyValueStore):
    """At most `capacity` bytes of values; the least recently used ones make room. Belongs to the event loop."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.values: OrderedDict[str, bytearray] = OrderedDict()
        self._bytes = 0
        self._evicted = 0

    async def exists(self, keys: Sequence[str]) -> int:
        return next((hits for hits, key in enumerate(keys) if not self._use(key)), len(keys))

    async def get(self, keys: Sequence[str], size: int) -> list[bytearray | None]:
        return [self.values[key] if self._use(key) else None for key in keys]

    async def set(self, keys: Sequence[str], values: Sequence[bytearray]) -> list[bool]:
        return [self._set(key, value) for key, value in zip(keys, values, strict=True)]

    async def remove(self, keys: Sequence[str]) -> int:
        return sum(self._remove(key) for key in keys)

    async def clear(self) -> None:
        self.values.clear()
        self._bytes = 0

    def stats(self) -> dict[str, float]:
        return {
            "l3_files": len(self.values),
            "l3_bytes": self._bytes,
            "l3_quota_bytes": self.capacity,
            "l3_evicted": self._evicted,
        }

    def _use(self, key: str) -> bool:
        if key not in self.values:
            return False
        self.values.move_to_end(key)
        return True

    def _set(self, key: str, value: bytearray) -> bool:
        if self._use(key):
            return True
        if len(value) > self.capacity:
            return False
        while self._bytes + len(value) > self.capacity:
            self._remove(next(iter(self.values)))
            self._evicted += 1
        self.values[key] = value
        self._bytes += len(value)
        return True

    def _remove(self, key: str) -> bool:
        value = self.values.pop(key, None)
        if value is None:
            return False
        self._bytes -= len(value)
        return True
