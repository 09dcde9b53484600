"""The smaller contract, for stores that know keys and bytes and nothing of pages: `sealed` makes a backend of one.

A value is a page behind a header with its checksums, so a store needn't notice when it damages or confuses values.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

Value = bytes | bytearray | memoryview


class KeyValueStore(ABC):
    """Byte strings under keys of at most KEY_CHARS letters, digits and one hyphen.

    Every method may raise: it counts as a failure of the store, and after some in a row the store is left alone for
    a while. No more than `timeout_s` is waited for a call; a call that takes longer is cancelled.
    """

    shared = False  # other instances see its values
    persistent = False  # values survive a restart of the service
    capacity = 0  # bytes, 0 = unknown

    @property
    def store_id(self) -> str:
        """Equal for two stores that see the same values; empty = this one is alone."""
        return ""

    async def start(self) -> None:  # noqa: B027 (nothing to do is a good default)
        """Reach the store. Called again after failures; raises StoreLostError when it isn't there now."""

    def expect(self, model: str, size: int) -> None:  # noqa: B027
        """Keys that begin with `model` will have values of `size` bytes."""

    @abstractmethod
    async def exists(self, keys: Sequence[str]) -> int:
        """Number of leading keys that it has."""

    @abstractmethod
    async def get(self, keys: Sequence[str], size: int) -> Sequence[Value | None]:
        """The value of each key, None for a miss; each should have `size` bytes."""

    @abstractmethod
    async def set(self, keys: Sequence[str], values: Sequence[bytearray]) -> Sequence[bool]:
        """Store values; True where the key has one now. A value that is there already may stay."""

    @abstractmethod
    async def remove(self, keys: Sequence[str]) -> int:
        """Forget keys; returns how many there were."""

    @abstractmethod
    async def clear(self) -> None:
        """Forget every key."""

    def stats(self) -> dict[str, float]:
        """Numbers for status and metrics, named l3_*."""
        return {}

    async def close(self) -> None:  # noqa: B027
        """Give everything up."""


KEY_CHARS = 129  # model fingerprint and digest in hexadecimal digits, a hyphen between them


def key_of(model_fingerprint: bytes, digest: bytes) -> str:
    """Key of a page."""
    return f"{model_fingerprint.hex()}-{digest.hex()}"
