"""One stored page: a header of whole 4096-byte blocks, then the page's bytes as they lie in the host pool.

    | magic | version | header bytes | model fingerprint | digest | page bytes | units | CRC32C of each unit |
    | proof | CRC32C |

The proof is there with `storage.key_file` (`page_key`). The last field covers the header before it. Header and page are
read and written with one system call, straight from and into the host pool: through aiofiles that takes three to five
times as long. The header ends on a block of the file system, so that the page begins on one.
"""

import contextlib
import fcntl
import os
import stat
import struct
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kernels.checksum import crc32c, crc32c_units
from services.storage import test_hooks
from services.storage.direct_io import BLOCK, block_buffer, fits, in_cache, move_direct
from services.storage.page_key import PROOF_BYTES, proof, proves
from shared.errors import StorageError
from shared.geometry import PageGeometry
from shared.segments import Checksums

MAGIC = b"KVTIDEPG"
VERSION = 1
FIXED = struct.Struct("<8sII32s32sQQ")
FIELDS = ("magic", "version", "header bytes", "model fingerprint", "digest", "page bytes", "units")
CHECK = struct.Struct("<I")
OPEN_TO_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a FIFO must not hold a thread
OPEN_TO_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
TOUCH_AFTER_S = 60  # a hit renews a file's time at most this often: a restart's LRU is right to the minute


class CorruptPageError(StorageError):
    """The file isn't the whole page that its name says."""


class PageFormat:
    """How the pages of one model lie in files; other stores take a header of smaller blocks."""

    def __init__(self, model_fingerprint: bytes, geometry: PageGeometry, block: int = BLOCK, key: bytes = b"") -> None:
        """key: only pages that were written with it are read; empty = any."""
        self.model_fingerprint = model_fingerprint
        self.geometry = geometry
        self.page_bytes = geometry.page_bytes
        units = [geometry.unit_bytes(part) for part in range(len(geometry.parts))]
        if len(set(units)) == 1:
            units, per_run = units[:1], geometry.units
        else:
            per_run = geometry.layers
        self._runs = [(geometry.unit_offset(part, 0), unit, unit * per_run) for part, unit in enumerate(units)]
        self._key = key
        self._proof_at = FIXED.size + 4 * geometry.units
        used = self._proof_at + (PROOF_BYTES if key else 0) + CHECK.size
        self.header_bytes = -(-used // block) * block

    @property
    def file_bytes(self) -> int:
        """Length of a file."""
        return self.header_bytes + self.page_bytes

    def header(self, digest: bytes, checksums: Checksums, page: memoryview) -> bytes:
        """The header of a page; `checksums` is uint32 [units]."""
        head = self._fixed(digest) + checksums.astype("<u4").tobytes()
        if self._key:
            head += proof(self._key, head, page)
        head = head.ljust(self.header_bytes - CHECK.size, b"\0")
        return head + CHECK.pack(crc32c(head))

    def checksums_in(self, header: bytes | memoryview, digest: bytes) -> Checksums:
        """The table of a header. Raises CorruptPageError naming the field that is wrong."""
        found, wanted = FIXED.unpack_from(header), FIXED.unpack(self._fixed(digest))
        for field, value, want in zip(FIELDS, found, wanted, strict=True):
            if value != want:
                raise CorruptPageError(f"{field} is {value!r} instead of {want!r}")
        if CHECK.unpack_from(header, self.header_bytes - CHECK.size)[0] != crc32c(memoryview(header)[: -CHECK.size]):
            raise CorruptPageError("the header's checksum is wrong")
        return np.frombuffer(header, "<u4", self.geometry.units, FIXED.size).astype(np.uint32)

    def checksums_of(self, page: memoryview) -> Checksums:
        """uint32 [units] of a page's bytes."""
        return np.concatenate([crc32c_units(page[start : start + size], unit) for start, unit, size in self._runs])

    def check_origin(self, header: bytes | memoryview, page: memoryview) -> None:
        """Raises CorruptPageError when a page wasn't written with the key."""
        at = self._proof_at
        if self._key and not proves(header[at : at + PROOF_BYTES], self._key, header[:at], page):
            raise CorruptPageError("it was not written with the key of storage.key_file")

    def verify(self, page: memoryview, checksums: Checksums) -> None:
        """Raises CorruptPageError when a page's bytes differ from its checksums, uint32 [units]."""
        wrong = (self.checksums_of(page) != checksums).nonzero()[0]
        if wrong.size:
            raise CorruptPageError(
                f"{wrong.size} of {checksums.size} units differ from their checksum, first {wrong[0]}"
            )

    def _fixed(self, digest: bytes) -> bytes:
        return FIXED.pack(
            MAGIC, VERSION, self.header_bytes, self.model_fingerprint, digest, self.page_bytes, self.geometry.units
        )


def read_page(path: Path, layout: PageFormat, digest: bytes, page: memoryview, *, verify: bool) -> Checksums:
    """Read a page's bytes into `page` and return its checksums, verified against the bytes unless told otherwise.

    Raises CorruptPageError, or OSError (FileNotFoundError for a page that isn't there).
    """
    test_hooks.before_read(path)
    header = block_buffer(layout.header_bytes)
    file = os.open(path, OPEN_TO_READ)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise CorruptPageError("it is no regular file")
        if status.st_size != layout.file_bytes:
            raise CorruptPageError(f"the file has {status.st_size} bytes instead of {layout.file_bytes}")
        if in_cache(file, layout.file_bytes) or not _direct(os.preadv, file, [header, page]):
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_WILLNEED)  # a cold page in one request instead of small ones
            _whole(os.preadv, file, [header, page])
        if time.time() - status.st_mtime > TOUCH_AFTER_S:
            with contextlib.suppress(PermissionError):  # another user's file in a shared folder
                os.utime(file)
    finally:
        os.close(file)
    checksums = layout.checksums_in(header, digest)
    layout.check_origin(header, page)
    if verify:
        layout.verify(page, checksums)
    return checksums


def write_page(
    path: Path, layout: PageFormat, digest: bytes, page: memoryview, checksums: Checksums, own: str, *, direct: bool
) -> int:
    """Write a page under a temporary name that ends in `own`, then give it its name. Returns the bytes it takes.

    direct: past the kernel's cache, where that is possible.

    The temporary file is locked while its writer lives: see `disk_scan`. Raises OSError, and leaves nothing then.
    """
    test_hooks.before_write()
    temporary = path.with_name(f"{path.stem}.{own}.tmp")
    try:
        file = os.open(temporary, OPEN_TO_WRITE, 0o600)
    except FileNotFoundError:  # the first page of its folder
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = os.open(temporary, OPEN_TO_WRITE, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.posix_fallocate(file, 0, layout.file_bytes)
        header = block_buffer(layout.header_bytes)
        header[:] = layout.header(digest, checksums, page)
        if not direct or not _direct(os.pwritev, file, [header, page]):
            _whole(os.pwritev, file, [header, page])
        temporary.rename(path)
        return allocated_bytes(os.fstat(file))
    except (OSError, StorageError):
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(file)


def allocated_bytes(status: os.stat_result) -> int:
    """Bytes that a file takes on its disk; its length where compression hides that."""
    return max(status.st_blocks * 512, status.st_size)


def _direct(move: Callable[[int, list[memoryview], int], int], file: int, buffers: list[memoryview]) -> bool:
    """`_whole`, past the kernel's cache. False when that is impossible here."""
    return fits(buffers) and move_direct(lambda: _whole(move, file, list(buffers)), file)


def _whole(move: Callable[[int, list[memoryview], int], int], file: int, buffers: list[memoryview]) -> None:
    """Call preadv or pwritev until every buffer is done: one call may move less than asked for."""
    offset = 0
    while buffers:
        moved = move(file, buffers, offset)
        if moved <= 0:
            raise CorruptPageError(f"the file ends at {offset}")
        offset += moved
        while buffers and moved >= len(buffers[0]):
            moved -= len(buffers.pop(0))
        if moved:
            buffers[0] = buffers[0][moved:]
