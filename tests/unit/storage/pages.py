"""A small page, its content by number, and a look at the files that hold it."""

import hashlib
import threading
from pathlib import Path

import numpy as np

from services.storage.backend import BatchRead, ModelPages
from services.storage.page_file import PageFormat
from shared.geometry import PageGeometry, Part

GEOMETRY = PageGeometry(16, 2, (Part("k", 2, 8, "float32"), Part("v", 2, 8, "float32")))
MODEL = b"m" * 32
FILE_BYTES = 4096 + GEOMETRY.page_bytes
GO = threading.Event()  # never set: nothing stops a batch


class Page:
    """Page number `n`: its digest, bytes and checksums."""

    def __init__(self, n: int) -> None:
        self.digest = hashlib.sha256(str(n).encode()).digest()
        self.bytes = np.random.default_rng(n).bytes(GEOMETRY.page_bytes)
        self.checksums = PageFormat(MODEL, GEOMETRY).checksums_of(memoryview(self.bytes))


def page_files(folder: Path) -> list[Path]:
    """Every stored page file."""
    return sorted(folder.glob("*/??/*.page"))


def disk_bytes(folder: Path) -> int:
    """What page files, good and bad, take on the disk."""
    files = [*page_files(folder), *folder.glob("quarantine/*")]
    return sum(path.stat().st_blocks * 512 for path in files)


def flip(at: int, data: bytes) -> bytes:
    """The same bytes but for one bit of byte `at`."""
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


async def put(pages: ModelPages, *numbers: int) -> list[bool]:
    """Store pages by number."""
    content = [Page(n) for n in numbers]
    buffers = [memoryview(bytearray(page.bytes)) for page in content]
    return await pages.batch_set([page.digest for page in content], buffers, [page.checksums for page in content], GO)


async def get(pages: ModelPages, *numbers: int) -> BatchRead:
    """Read pages by number; a hit must have the right bytes and checksums."""
    buffers = [bytearray(GEOMETRY.page_bytes) for _ in numbers]
    read = await pages.batch_get([Page(n).digest for n in numbers], [memoryview(each) for each in buffers], GO)
    for n, buffer, checksums in zip(numbers, buffers, read.checksums, strict=True):
        if checksums is not None:
            assert bytes(buffer) == Page(n).bytes
            assert (checksums == Page(n).checksums).all()
    return read


async def hits(pages: ModelPages, *numbers: int) -> list[bool]:
    """Which pages can be read."""
    return [each is not None for each in (await get(pages, *numbers)).checksums]


async def exists(pages: ModelPages, *numbers: int) -> int:
    """Leading pages that the store says it has."""
    return await pages.batch_exists([Page(n).digest for n in numbers])
