"""Binds the C extension that `kernels.build` makes. Calls release the GIL."""

import ctypes
import functools
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kernels.build import library_path

Addresses = npt.NDArray[np.uint64]
Checksums = npt.NDArray[np.uint32]

CHECK_INPUT, CHECK_VALUE = b"123456789", 0xE3069283  # the check value that the CRC catalogues give for CRC32C


class Native(NamedTuple):
    """The loaded library, and whether its checksums use the machine's CRC instruction."""

    library: ctypes.CDLL
    hardware: bool

    def copy_units(self, dst: Addresses, src: Addresses, unit_bytes: int) -> Checksums:
        """Copy unit i from address src[i] to dst[i]; uint32 [n]: each one's CRC32C. The caller checked the ranges."""
        dst, src = np.ascontiguousarray(dst), np.ascontiguousarray(src)
        crc = np.empty(len(src), dtype=np.uint32)
        self.library.copy_units(
            dst.ctypes.data, src.ctypes.data, unit_bytes, len(src), crc.ctypes.data, int(self.hardware)
        )
        return crc

    def crc_units(self, src: Addresses, unit_bytes: int) -> Checksums:
        """uint32 [n]: CRC32C of the `unit_bytes` bytes at each address. The caller checked the ranges."""
        src = np.ascontiguousarray(src)
        crc = np.empty(len(src), dtype=np.uint32)
        self.library.crc_units(src.ctypes.data, unit_bytes, len(src), crc.ctypes.data, int(self.hardware))
        return crc


@functools.cache
def load() -> tuple[Native | None, str]:
    """The C extension if it is built and right, and why it is used or not. Loaded once per process."""
    path = library_path()
    if not path.exists():
        return None, "not built; run `python -m kernels.build`"
    try:
        native = _bind(ctypes.CDLL(str(path)))
    except (OSError, AttributeError) as error:
        return None, f"{path.name} does not load ({error}); delete it and run `python -m kernels.build`"
    sample = np.frombuffer(CHECK_INPUT, dtype=np.uint8)
    found = int(native.crc_units(np.array([sample.ctypes.data], dtype=np.uint64), sample.size)[0])
    if found != CHECK_VALUE:
        return None, f"{path.name} computes {found:#x} instead of {CHECK_VALUE:#x}; delete it and build again"
    return native, "crc instruction" if native.hardware else "tables: this processor has no crc instruction"


def _bind(library: ctypes.CDLL) -> Native:
    pointer, size, flag = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.copy_units.argtypes = (pointer, pointer, size, size, pointer, flag)
    library.crc_units.argtypes = (pointer, size, size, pointer, flag)
    library.copy_units.restype = library.crc_units.restype = None
    library.has_crc_instruction.argtypes = ()
    library.has_crc_instruction.restype = flag
    return Native(library, hardware=bool(library.has_crc_instruction()))
