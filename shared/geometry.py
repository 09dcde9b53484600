"""The one description of a page's bytes, and the fingerprint that names it.

A host page is one contiguous range of `page_bytes`, so that a page is one file, one read and one checksum table.
Inside it, `page_first_direct` orders the bytes as (part, layer, page_size, heads, head_dim); one (part, layer) is a
*unit*: contiguous on the device, copied and checksummed as a whole.

    page:   | part 0: layer 0 | layer 1 | ... | part 1: layer 0 | layer 1 | ... |
"""

import hashlib
from typing import Literal

import msgspec

from shared.errors import GeometryError

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}

HostLayout = Literal["page_first_direct"]


class Part(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One tensor kind that every layer keeps per token."""

    name: str  # "k", "v"; later "latent", "scale", ...
    heads: int  # of this rank
    head_dim: int  # elements
    dtype: str  # a key of ITEM_BYTES

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer."""
        return self.heads * self.head_dim * ITEM_BYTES[self.dtype]


class PageGeometry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Shape of a page. Raises GeometryError when a value is out of range."""

    page_size: int  # tokens
    layers: int
    parts: tuple[Part, ...]
    tp_rank: int = 0
    tp_size: int = 1
    layout: HostLayout = "page_first_direct"

    def __post_init__(self) -> None:
        if self.page_size < 1 or self.page_size & (self.page_size - 1):
            raise GeometryError(f"page_size {self.page_size} is not a power of two; use 16, 32, 64, 128 or 256")
        if self.layers < 1 or not self.parts:
            raise GeometryError(f"a page needs layers and parts, got layers={self.layers} parts={self.parts}")
        for part in self.parts:
            if part.dtype not in ITEM_BYTES:
                raise GeometryError(f"dtype {part.dtype!r} is not one of {', '.join(ITEM_BYTES)}")
        if not 0 <= self.tp_rank < self.tp_size:
            raise GeometryError(f"tp_rank {self.tp_rank} is outside 0..{self.tp_size - 1}")
        if self.tp_size > 1:
            raise GeometryError(f"tp_size {self.tp_size} needs the page_head layout, which this version lacks; use 1")

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers and parts."""
        return self.layers * sum(part.token_bytes for part in self.parts)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers and parts."""
        return self.page_size * self.token_bytes

    @property
    def units(self) -> int:
        """Checksums per page: one for each (part, layer)."""
        return len(self.parts) * self.layers

    def unit_bytes(self, part: int) -> int:
        """Bytes of one unit of `part`."""
        return self.page_size * self.parts[part].token_bytes

    def unit_index(self, part: int, layer: int) -> int:
        """Row of (part, layer) in a page's checksum table."""
        return part * self.layers + layer

    def unit_offset(self, part: int, layer: int) -> int:
        """Byte offset of (part, layer) inside a host page."""
        before = sum(self.unit_bytes(p) for p in range(part)) * self.layers
        return before + layer * self.unit_bytes(part)

    @property
    def fingerprint(self) -> bytes:
        """32 bytes that differ whenever the bytes of a page would."""
        return hashlib.sha256(b"kvtide-geometry-1" + msgspec.msgpack.encode(self)).digest()


def model_fingerprint(geometry: PageGeometry, weights: bytes) -> bytes:
    """The first half of a stored page's key: 32 bytes over the geometry and the weights' own fingerprint."""
    return hashlib.sha256(b"kvtide-model-1" + geometry.fingerprint + weights).digest()
