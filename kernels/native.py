"""Binds the C extension that `kernels.build` makes. Calls release the GIL."""

import ctypes
import functools
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from kernels.build import library_path

Addresses = npt.NDArray[np.uint64]
PageIds = npt.NDArray[np.int64]
Places = npt.NDArray[np.int64]
Checksums = npt.NDArray[np.uint32]

CHECK_INPUT, CHECK_VALUE = b"123456789", 0xE3069283  # the check value that the CRC catalogues give for CRC32C


class Shape(ctypes.Structure):
    """`struct shape` of paged_attention.c."""

    _fields_: ClassVar = [
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "dim", "page_size", "q_row")),
        ("scale", ctypes.c_float),
        ("bfloat", ctypes.c_int),
    ]


class Native(NamedTuple):
    """The loaded library, and whether its checksums use the machine's CRC instruction."""

    library: ctypes.CDLL
    hardware: bool

    def copy_pages(
        self, host: int, places: Places, device_pages: PageIds, host_pages: PageIds, crc: Checksums, to_host: bool
    ) -> None:
        """Copy these units of page device_pages[i] to host_pages[i] of the pool at address `host`, or back.

        places: int64 [units, 4]: device address of page 0, host offset of page 0, host bytes from one page to the
        next, bytes of a unit. crc: uint32 [n, units], filled. All are contiguous; the caller checked the ranges.
        """
        self.library.copy_pages(
            *(host, places.ctypes.data, len(places), device_pages.ctypes.data, host_pages.ctypes.data),
            *(len(device_pages), crc.ctypes.data, int(to_host), int(self.hardware)),
        )

    def decode_attention(
        self, q: int, k_pool: int, v_pool: int, out: int, rows: tuple[int, int, int, int], shape: Shape, scratch: int
    ) -> None:
        """Attention of one token each of several requests: see paged_attention.c. All but `shape` are addresses;
        rows: of the page ids, of each row's first of them, of each row's length, and the number of rows."""
        self.library.decode_attention(q, k_pool, v_pool, out, *rows, ctypes.byref(shape), scratch)

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
    library.copy_pages.argtypes = (pointer, pointer, size, pointer, pointer, size, pointer, flag, flag)
    library.crc_units.argtypes = (pointer, size, size, pointer, flag)
    library.decode_attention.argtypes = (*(pointer,) * 7, ctypes.c_int64, pointer, pointer)
    library.decode_attention.restype = None
    library.copy_pages.restype = library.crc_units.restype = None
    library.has_crc_instruction.argtypes = ()
    library.has_crc_instruction.restype = flag
    return Native(library, hardware=bool(library.has_crc_instruction()))
