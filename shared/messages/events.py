"""Scheduler -> anybody who subscribes: KV events (EVENT-01), as SGLang lays them out.

Trailing fields that a decoder doesn't know are ignored, missing ones with a default are filled in: so one encoding
serves SGLang's structs and vLLM's array-like ones, older and newer.
"""

from typing import Literal

import msgspec

HASH_BYTES = 8  # of a digest: the field's block hashes are 64-bit

Medium = Literal["GPU", "CPU_PINNED", "DISK", "EXTERNAL"]


class KVCacheEvent(msgspec.Struct, frozen=True, array_like=True):
    """Base of the events; the tag stands first in the array."""


class BlockStored(KVCacheEvent, tag=True):
    """A tier has consecutive pages of one sequence from now on."""

    block_hashes: list[int]  # one for each page, in order
    parent_block_hash: int | None  # of the page before; None = first page; a salted first page's is its namespace
    token_ids: list[int]  # of all pages
    block_size: int  # tokens in a page
    lora_id: int | None = None  # always None: adapters are part of the namespace
    medium: Medium = "GPU"  # the tier
    lora_name: str | None = None  # always None; vLLM's decoder wants the place


class BlockRemoved(KVCacheEvent, tag=True):
    """A tier hasn't these pages any more."""

    block_hashes: list[int]  # one for each page
    medium: Medium = "GPU"  # the tier


class AllBlocksCleared(KVCacheEvent, tag=True):
    """Forget everything: a scheduler has started with an empty tree."""


AnyEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, frozen=True, array_like=True):
    """What one step of the scheduler has changed, in order."""

    ts: float  # seconds since 1970
    events: list[AnyEvent]  # in order
    data_parallel_rank: int | None = None  # always None: replicas have endpoints of their own


def block_hash(digest: bytes) -> int:
    """A digest's first 8 bytes as a signed int64, big-endian (SGLang's)."""
    return int.from_bytes(digest[:HASH_BYTES], "big", signed=True)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(KVEventBatch)


def encode_batch(batch: KVEventBatch) -> bytes:
    """The payload of a message."""
    return _encoder.encode(batch)


def decode_batch(payload: bytes) -> KVEventBatch:
    """The inverse. Raises msgspec.DecodeError for anything else."""
    return _decoder.decode(payload)
