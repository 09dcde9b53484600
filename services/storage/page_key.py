"""Proof of a stored page's origin: a keyed hash (BLAKE2b, RFC 7693) that only who has the key can make."""

import hashlib
import hmac
import logging
from pathlib import Path

from shared.errors import StorageError

PROOF_BYTES = 32
LEAST_BYTES = 16  # of a key: nobody tries 2^128

log = logging.getLogger("kvtide.storage")


def read_key(path: Path) -> bytes:
    """The key in a file, 32 bytes whatever the file has. Raises StorageError when it can't be read or is too short."""
    try:
        content = path.read_bytes()
        mode = path.stat().st_mode
    except OSError as error:
        raise StorageError(f"can't read the key of the pages {path}: {error.strerror}; see storage.key_file") from None
    if len(content) < LEAST_BYTES:
        raise StorageError(
            f"the key of the pages {path} has {len(content)} bytes, {LEAST_BYTES} are the least: "
            f"make one by head -c 32 /dev/urandom > {path}"
        )
    if mode & 0o077:
        log.warning("key_readable_by_others path=%s: chmod 600", path)
    return hashlib.sha256(content).digest()


def proof(key: bytes, head: bytes | memoryview, page: memoryview) -> bytes:
    """Of a page with its header."""
    found = hashlib.blake2b(head, digest_size=PROOF_BYTES, key=key)
    found.update(page)
    return found.digest()


def proves(stored: bytes | memoryview, key: bytes, head: bytes | memoryview, page: memoryview) -> bool:
    """Compared in constant time."""
    return hmac.compare_digest(bytes(stored), proof(key, head, page))
