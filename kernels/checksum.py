"""CRC32C of page units: C when it is built, else the google-crc32c wheel. No torch."""

from mmap import mmap
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt

from kernels import native
from kernels.native import Checksums
from shared.errors import GeometryError

Buffer = bytes | bytearray | memoryview | mmap | npt.NDArray[Any]


def which() -> str:
    """The version that runs here, and why."""
    extension, reason = native.load()
    return f"C ({reason})" if extension else f"google-crc32c {google_crc32c.implementation} (C: {reason})"


def crc32c(buffer: Buffer) -> int:
    """CRC32C of a contiguous buffer."""
    data = np.frombuffer(buffer, dtype=np.uint8)
    return int(crc32c_units(data, data.size)[0]) if data.size else 0


def crc32c_units(buffer: Buffer, unit_bytes: int) -> Checksums:
    """uint32 [n]: CRC32C of each consecutive `unit_bytes` bytes of a contiguous buffer.

    Raises GeometryError when the buffer doesn't hold a whole number of units.
    """
    data = np.frombuffer(buffer, dtype=np.uint8)
    if unit_bytes < 1 or data.size % unit_bytes:
        raise GeometryError(f"{data.size} bytes are not whole units of {unit_bytes}; pass whole units")
    extension, _ = native.load()
    if extension is None:
        units = data.reshape(-1, unit_bytes)
        return np.array([google_crc32c.value(unit.tobytes()) for unit in units], dtype=np.uint32)
    starts = data.ctypes.data + np.arange(0, data.size, unit_bytes, dtype=np.uint64)
    return extension.crc_units(starts, unit_bytes)


def crc32c_rows(rows: npt.NDArray[np.uint8], nbytes: int) -> Checksums:
    """uint32 [n]: CRC32C of the first `nbytes` bytes of each row of uint8 [n, m], contiguous.

    Raises GeometryError when rows are shorter.
    """
    if nbytes > rows.shape[1] or not rows.flags.c_contiguous:
        raise GeometryError(f"rows of {rows.shape[1]} bytes have no {nbytes} contiguous bytes; pass whole rows")
    extension, _ = native.load()
    if extension is None:
        return np.array([google_crc32c.value(row[:nbytes].tobytes()) for row in rows], dtype=np.uint32)
    starts = rows.ctypes.data + np.arange(len(rows), dtype=np.uint64) * np.uint64(rows.shape[1])
    return extension.crc_units(starts, nbytes)
