"""CRC32C of page units: C when it is built, else the google-crc32c wheel. No torch."""

from mmap import mmap
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt

from kernels import native
from kernels.native import Checksums, Units
from shared.errors import GeometryError

Buffer = bytes | bytearray | memoryview | mmap | npt.NDArray[Any]


def which() -> str:
    """The version that runs here, and why."""
    extension, reason = native.load()
    return f"C ({reason})" if extension else f"google-crc32c {google_crc32c.implementation} (C: {reason})"


def crc32c(buffer: Buffer) -> int:
    """CRC32C of a contiguous buffer."""
    data = np.frombuffer(buffer, dtype=np.uint8)
    return int(crc32c_units(data, np.array([[0, 0, 1, data.size]]))[0]) if data.size else 0


def crc32c_units(buffer: Buffer, units: Units) -> Checksums:
    """uint32 [n]: CRC32C of units of a contiguous buffer.

    units: int64 [n, 4], a row for each: where it begins, the bytes from one of its runs to the next, the number of
    runs, the bytes of each. Raises GeometryError for a unit outside the buffer.
    """
    data = np.frombuffer(buffer, dtype=np.uint8)
    units = np.ascontiguousarray(units, dtype=np.int64)
    start, stride, runs, run_bytes = units.T
    outside = (start < 0) | (stride < 0) | (runs < 1) | (run_bytes < 1)
    outside |= start + (runs - 1) * stride + run_bytes > data.size
    if outside.any():
        raise GeometryError(
            f"unit {units[outside][0].tolist()} (start, stride, runs, bytes) is not in {data.size} bytes"
        )
    extension, _ = native.load()
    if extension is None:
        return np.array([google_crc32c.value(_joined(data, *unit)) for unit in units.tolist()], dtype=np.uint32)
    return extension.crc_units(data.ctypes.data, units)


def crc32c_rows(rows: npt.NDArray[np.uint8], nbytes: int) -> Checksums:
    """uint32 [n]: CRC32C of the first `nbytes` bytes of each row of uint8 [n, m], contiguous.

    Raises GeometryError when rows are shorter.
    """
    count, width = rows.shape
    if nbytes > width or not rows.flags.c_contiguous:
        raise GeometryError(f"rows of {width} bytes have no {nbytes} contiguous bytes; pass whole rows")
    return crc32c_units(
        rows.reshape(-1), np.array([[row * width, 0, 1, nbytes] for row in range(count)]).reshape(-1, 4)
    )


def _joined(data: npt.NDArray[np.uint8], start: int, stride: int, runs: int, run_bytes: int) -> bytes:
    return b"".join(data[start + run * stride :][:run_bytes].tobytes() for run in range(runs))
