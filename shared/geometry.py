"""The one description of a page's bytes, and the fingerprint that names it.

A page is `page_bytes` long, one file in L3, one read and one checksum table. `host_layout` says where each byte lies.
"""

import hashlib
from typing import Literal

import msgspec

from shared.errors import GeometryError

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}

HostLayout = Literal["page_first_direct", "page_first", "page_head", "layer_first"]


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
            raise GeometryError(f"tp_size {self.tp_size}: this version has one rank; use 1")

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
        """Checksums per page: one for each (part, layer), in `page_head` for each KV head of it."""
        return self.layers * sum(part.heads if self.layout == "page_head" else 1 for part in self.parts)

    def unit_bytes(self, part: int) -> int:
        """Bytes of one layer of `part`."""
        return self.page_size * self.parts[part].token_bytes

    @property
    def fingerprint(self) -> bytes:
        """32 bytes that differ whenever the bytes of a page would."""
        return hashlib.sha256(b"kvtide-geometry-1" + msgspec.msgpack.encode(self)).digest()


def model_fingerprint(geometry: PageGeometry, weights: bytes) -> bytes:
    """The first half of a stored page's key: 32 bytes over the geometry and the weights' own fingerprint."""
    return hashlib.sha256(b"kvtide-model-1" + geometry.fingerprint + weights).digest()
