"""CRC32C: known vectors, and C (with the instruction and with tables) equal to the wheel on any bytes."""

import subprocess
import sys

import google_crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels import checksum, native
from shared.errors import GeometryError

KNOWN = [  # RFC 3720, B.4, and the catalogues' check value
    (b"123456789", 0xE3069283),
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (b"", 0),
]


@pytest.mark.parametrize(("data", "expected"), KNOWN)
def test_known_vectors(version: str, data: bytes, expected: int) -> None:
    assert checksum.crc32c(data) == expected
    assert checksum.crc32c(memoryview(bytearray(data))) == expected


@pytest.mark.parametrize(("stride", "runs", "run_bytes"), [(1000, 1, 1000), (100, 5, 24), (30, 4, 7)])
def test_units_of_one_run_or_several(version: str, stride: int, runs: int, run_bytes: int) -> None:
    data = np.random.default_rng(0).integers(0, 256, 7 * 1000, dtype=np.uint8)
    starts = range(0, 7000, 1000)
    expected = [
        google_crc32c.value(b"".join(data[start + run * stride :][:run_bytes].tobytes() for run in range(runs)))
        for start in starts
    ]
    units = np.array([(start, stride, runs, run_bytes) for start in starts])
    assert checksum.crc32c_units(data, units).tolist() == expected
    assert checksum.crc32c_units(memoryview(data.tobytes()), units).tolist() == expected
    assert checksum.crc32c_units(data, units[:0]).shape == (0,)


@pytest.mark.parametrize(
    "unit", [(0, 0, 1, 11), (3, 4, 2, 4), (-1, 1, 1, 1), (0, 2, 0, 4), (0, 1, 1, 0), (5, -1, 2, 1)]
)
def test_a_unit_outside_the_buffer_is_refused(version: str, unit: tuple[int, ...]) -> None:
    with pytest.raises(GeometryError, match="is not in 10 bytes"):
        checksum.crc32c_units(b"0123456789", np.array([(0, 0, 1, 10), unit]))


@pytest.mark.parametrize("hardware", [True, False])
@given(data=st.binary(min_size=1, max_size=1500), start=st.integers(0, 17))
def test_c_equals_the_wheel_at_any_length_and_alignment(hardware: bool, data: bytes, start: int) -> None:
    loaded, reason = native.load()
    if loaded is None or (hardware and not loaded.hardware):
        pytest.skip(reason)
    extension = loaded._replace(hardware=hardware)
    source = np.frombuffer(bytes(start) + data, dtype=np.uint8)
    target = np.zeros(start + len(data) + 1, dtype=np.uint8)
    expected, crc, page = google_crc32c.value(data), np.zeros((1, 1), dtype=np.uint32), np.zeros(1, dtype=np.int64)
    assert extension.crc_units(source.ctypes.data, np.array([[start, 0, 1, len(data)]]))[0] == expected
    places = np.array([[source.ctypes.data + start, 0, 0, start, 0, 0, 1, len(data)]], dtype=np.int64)
    extension.copy_pages(target.ctypes.data, places, page, page, crc, True)
    assert crc[0, 0] == expected
    assert target.tobytes() == bytes(start) + data + b"\0"


def test_needs_no_torch() -> None:
    code = "import sys, kernels.checksum, kernels.page_copy, kernels.build; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_which_says_what_runs(version: str) -> None:
    assert ("google-crc32c" in checksum.which()) == (version == "reference")
