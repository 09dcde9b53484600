"""One stored page: a header of whole 4096-byte blocks, then the page's bytes as they lie in the host pool.

    | magic | version | header bytes | model fingerprint | digest | page bytes | units | CRC32C of each unit |
    | proof | CRC32C |

The proof is there with `storage.key_file` (`page_key`). The last field covers the header before it. The header ends on
a block of the file system, so that the page begins on one: `page_batch` moves both between disk and host pool.
"""

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kernels.checksum import crc32c, crc32c_rows, crc32c_units
from services.storage.direct_io import BLOCK
from services.storage.page_key import PROOF_BYTES, proof, proves
from shared.errors import StorageError
from shared.geometry import PageGeometry
from shared.host_layout import units_of
from shared.page_hash import DIGEST_BYTES
from shared.segments import Checksums

MAGIC = b"KVTIDEPG"
VERSION = 1
FIXED = struct.Struct("<8sII32s32sQQ")
FIELDS = ("magic", "version", "header bytes", "model fingerprint", "digest", "page bytes", "units")
CHECK = struct.Struct("<I")
DIGEST_AT = struct.calcsize("<8sII32s")

Bytes2D = npt.NDArray[np.uint8]


class CorruptPageError(StorageError):
    """The file isn't the whole page that its name says."""


class PageFormat:
    """How the pages of one model lie in files; other stores take a header of smaller blocks."""

    def __init__(self, model_fingerprint: bytes, geometry: PageGeometry, block: int = BLOCK, key: bytes = b"") -> None:
        """key: only pages that were written with it are read; empty = any."""
        self.model_fingerprint = model_fingerprint
        self.geometry = geometry
        self.page_bytes = geometry.page_bytes
        self.units = np.array([(each.start, each.stride, each.runs, each.run_bytes) for each in units_of(geometry)])
        self._key = key
        self._proof_at = FIXED.size + 4 * geometry.units
        used = self._proof_at + (PROOF_BYTES if key else 0) + CHECK.size
        self.header_bytes = -(-used // block) * block

    @property
    def file_bytes(self) -> int:
        """Length of a file."""
        return self.header_bytes + self.page_bytes

    @property
    def keyed(self) -> bool:
        """Are only pages of one key read?"""
        return bool(self._key)

    def header(self, digest: bytes, checksums: Checksums, page: memoryview) -> bytes:
        """The header of a page; `checksums` is uint32 [units]."""
        header = np.empty((1, self.header_bytes), np.uint8)
        self.fill(header, [digest], [checksums], [page])
        return header.tobytes()

    def fill(
        self, headers: Bytes2D, digests: Sequence[bytes], checksums: Sequence[Checksums], pages: Sequence[memoryview]
    ) -> None:
        """Write the headers of n pages into uint8 [n, header_bytes], contiguous."""
        headers[:, : FIXED.size] = self.beginnings(digests)
        headers[:, FIXED.size : self._proof_at] = np.array(checksums, dtype="<u4").view(np.uint8)
        headers[:, self._proof_at :] = 0
        if self._key:
            for header, page in zip(headers, pages, strict=True):
                found = proof(self._key, header[: self._proof_at].data, page)
                header[self._proof_at : self._proof_at + PROOF_BYTES] = np.frombuffer(found, np.uint8)
        crc = crc32c_rows(headers, self.header_bytes - CHECK.size)
        headers[:, -CHECK.size :] = crc.astype("<u4").view(np.uint8).reshape(-1, CHECK.size)

    def beginnings(self, digests: Sequence[bytes]) -> Bytes2D:
        """uint8 [n, 112]: what the headers of these pages begin with."""
        one = np.frombuffer(self._fixed(bytes(DIGEST_BYTES)), np.uint8)
        found = np.tile(one, (len(digests), 1))
        wanted = np.frombuffer(b"".join(digests), np.uint8).reshape(-1, DIGEST_BYTES)
        found[:, DIGEST_AT : DIGEST_AT + DIGEST_BYTES] = wanted
        return found

    def tables(self, headers: Bytes2D) -> Checksums:
        """uint32 [n, units]: the checksums in n headers."""
        found = np.ascontiguousarray(headers[:, FIXED.size : self._proof_at])
        return found.view("<u4").astype(np.uint32, copy=False)

    def checksums_in(self, header: bytes | memoryview, digest: bytes) -> Checksums:
        """The table of a header. Raises CorruptPageError naming the field that is wrong."""
        found, wanted = FIXED.unpack_from(header), FIXED.unpack(self._fixed(digest))
        for field, value, want in zip(FIELDS, found, wanted, strict=True):
            if value != want:
                raise CorruptPageError(f"{field} is {value!r} instead of {want!r}")
        if CHECK.unpack_from(header, self.header_bytes - CHECK.size)[0] != crc32c(memoryview(header)[: -CHECK.size]):
            raise CorruptPageError("the header's checksum is wrong")
        return self.tables(np.frombuffer(header, np.uint8).reshape(1, -1))[0]

    def checksums_of(self, page: memoryview) -> Checksums:
        """uint32 [units] of a page's bytes."""
        return crc32c_units(page, self.units)

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
