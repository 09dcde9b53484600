"""Binds the C extension that `kernels.build` makes. Calls release the GIL."""

import ctypes
import functools
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from kernels.build import library_path

PageIds = npt.NDArray[np.int64]
Places = npt.NDArray[np.int64]
Units = npt.NDArray[np.int64]
Checksums = npt.NDArray[np.uint32]

CHECK_INPUT, CHECK_VALUE = b"123456789", 0xE3069283  # the check value that the CRC catalogues give for CRC32C


class Shape(ctypes.Structure):
    """`struct shape` of paged_attention.c."""

    _fields_: ClassVar = [
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "dim", "page_size", "q_row")),
        ("scale", ctypes.c_float),
        ("bfloat", ctypes.c_int),
    ]


class PageBatch(ctypes.Structure):
    """`struct page_batch` of page_files.c. Whoever fills it keeps what its addresses name."""

    _fields_: ClassVar = [
        *((name, ctypes.POINTER(ctypes.c_char_p)) for name in ("paths", "temporaries")),
        *((name, ctypes.c_void_p) for name in ("headers", "pages", "beginnings", "outcomes", "lengths")),
        *((name, ctypes.c_void_p) for name in ("replaces", "past_cache", "table", "crc")),
        *((name, ctypes.c_int64) for name in ("header_bytes", "page_bytes", "beginning_bytes")),
        *((name, ctypes.c_int64) for name in ("units", "call_bytes", "touch_after_s")),
        *((name, ctypes.c_int32) for name in ("verify", "direct", "sync", "sealed", "hardware", "stop")),
    ]


class Native(NamedTuple):
    """The loaded library, and whether its checksums use the machine's CRC instruction."""

    library: ctypes.CDLL
    hardware: bool
    page_files: bool  # it has `move_pages`: on Linux

    def move_pages(self, batch: PageBatch, first: int, last: int, writing: bool) -> int:
        """Read or write the waiting pages of [first, last); returns the first that it didn't come to."""
        return int(self.library.move_pages(ctypes.byref(batch), first, last, int(writing)))

    def copy_pages(
        self, host: int, places: Places, device_pages: PageIds, host_pages: PageIds, crc: Checksums, to_host: bool
    ) -> None:
        """Copy these units of page device_pages[i] to host_pages[i] of the pool at address `host`, or back.

        places: int64 [units, 8], `struct place` of page_copy.c. crc: uint32 [n, units], filled. All are contiguous;
        the caller checked the ranges.
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

    def linear(self, x: int, weight: int, bias: int, y: int, shape: tuple[int, int, int], threads: int) -> None:
        """See linear.c. Addresses, 0 for no bias; shape: rows, in, out. Raises MemoryError."""
        if self.library.linear(x, weight, bias, y, *shape, threads):
            raise MemoryError(f"no memory for {shape[0]} rows of {shape[1]} floats")

    def rms_norm(self, x: int, weight: int, y: int, shape: tuple[int, int], eps: float) -> None:
        """See rowwise.c. Addresses; shape: rows, size."""
        self.library.rms_norm(x, weight, y, *shape, eps)

    def silu_and_mul(self, gate_up: int, y: int, shape: tuple[int, int]) -> None:
        """See rowwise.c. Addresses; shape: rows, size."""
        self.library.silu_and_mul(gate_up, y, *shape)

    def rotate(self, x: int, row_stride: int, cos: int, sin: int, y: int, shape: tuple[int, int, int]) -> None:
        """See rowwise.c. Addresses and the stride; shape: rows, heads, dim."""
        self.library.rotate(x, row_stride, cos, sin, y, *shape)

    def crc_units(self, data: int, units: Units) -> Checksums:
        """uint32 [n]: CRC32C of units of the data at an address. units: int64 [n, 4], `struct unit` of crc32c.h,
        contiguous. The caller checked the ranges."""
        crc = np.empty(len(units), dtype=np.uint32)
        self.library.crc_units(data, units.ctypes.data, len(units), crc.ctypes.data, int(self.hardware))
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
    found = int(native.crc_units(sample.ctypes.data, np.array([[0, 0, 1, sample.size]], dtype=np.int64))[0])
    if found != CHECK_VALUE:
        return None, f"{path.name} computes {found:#x} instead of {CHECK_VALUE:#x}; delete it and build again"
    return native, "crc instruction" if native.hardware else "tables: this processor has no crc instruction"


def _bind(library: ctypes.CDLL) -> Native:
    pointer, size, flag = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.copy_pages.argtypes = (pointer, pointer, size, pointer, pointer, size, pointer, flag, flag)
    library.crc_units.argtypes = (pointer, pointer, size, pointer, flag)
    library.linear.argtypes = (*(pointer,) * 4, *(ctypes.c_int64,) * 3, flag)
    library.linear.restype = flag
    library.rms_norm.argtypes = (*(pointer,) * 3, *(ctypes.c_int64,) * 2, ctypes.c_float)
    library.silu_and_mul.argtypes = (*(pointer,) * 2, *(ctypes.c_int64,) * 2)
    library.rotate.argtypes = (pointer, ctypes.c_int64, *(pointer,) * 3, *(ctypes.c_int64,) * 3)
    library.rotate.restype = None
    library.rms_norm.restype = library.silu_and_mul.restype = None
    library.decode_attention.argtypes = (*(pointer,) * 7, ctypes.c_int64, pointer, pointer)
    library.decode_attention.restype = None
    library.copy_pages.restype = library.crc_units.restype = None
    library.has_crc_instruction.argtypes = ()
    library.has_crc_instruction.restype = flag
    page_files = hasattr(library, "move_pages")
    if page_files:
        library.move_pages.argtypes = (pointer, ctypes.c_int64, ctypes.c_int64, ctypes.c_int32)
        library.move_pages.restype = ctypes.c_int64
    return Native(library, bool(library.has_crc_instruction()), page_files)
