"""The name of a page's content: SHA-256 chained over tokens, as SGLang chains it."""

import hashlib
from collections.abc import Iterator

import msgspec

DIGEST_BYTES = 32
TOKEN_BYTES = 4  # int32, little-endian


def namespace_seed(tenant: str, lora_id: str, extra_key: str) -> bytes:
    """What stands in for the first page's parent digest: empty in the default namespace.

    The three fields are framed by msgpack, so that ("a", "bc") and ("ab", "c") differ.
    """
    if not (tenant or lora_id or extra_key):
        return b""
    return hashlib.sha256(msgspec.msgpack.encode([tenant, lora_id, extra_key])).digest()


def split_digests(joined: bytes) -> list[bytes]:
    """The digests that stand one after the other in a message."""
    return [joined[at : at + DIGEST_BYTES] for at in range(0, len(joined), DIGEST_BYTES)]


def chain(parent: bytes, tokens: bytes, page_size: int) -> Iterator[bytes]:
    """Digests of the whole pages of `tokens` (packed int32), each over its parent's digest and its own tokens."""
    step = page_size * TOKEN_BYTES
    for start in range(0, len(tokens) - step + 1, step):
        parent = hashlib.sha256(parent + tokens[start : start + step]).digest()
        yield parent
