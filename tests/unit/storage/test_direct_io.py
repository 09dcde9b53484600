"""Page files past the kernel's cache: the same bytes, and a way back where it is impossible."""

import errno
import fcntl
import mmap
import os
import secrets
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.storage import direct_io, page_file
from services.storage.direct_io import BLOCK
from services.storage.page_file import CorruptPageError, PageFormat, read_page, write_page
from shared.geometry import PageGeometry, Part
from shared.segments import Checksums

MODEL = bytes(range(32))
WHOLE_BLOCKS = PageGeometry(64, 2, (Part("k", 4, 8, "bfloat16"), Part("v", 4, 8, "bfloat16")))
ODD = PageGeometry(1, 2, (Part("k", 1, 3, "float16"), Part("v", 1, 5, "float16")))


class OnePage:
    """A page in memory that begins on a block, and its file."""

    def __init__(self, folder: Path, geometry: PageGeometry) -> None:
        self.layout, self.path, self.digest = PageFormat(MODEL, geometry), folder / "one.page", bytes(32)
        self.bytes = secrets.token_bytes(geometry.page_bytes)
        self.checksums: Checksums = self.layout.checksums_of(memoryview(self.bytes))

    def write(self, direct: bool) -> None:
        write_page(self.path, self.layout, self.digest, self.memory(self.bytes), self.checksums, "own", direct=direct)

    def read(self) -> bytes:
        page = self.memory()
        checksums = read_page(self.path, self.layout, self.digest, page, verify=True)
        np.testing.assert_array_equal(checksums, self.checksums)
        return bytes(page)

    def memory(self, content: bytes = b"") -> memoryview:
        memory = mmap.mmap(-1, self.layout.page_bytes)
        memory[: len(content)] = content
        return memoryview(memory)


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What each attempt to go past the cache came to."""
    outcomes: list[bool] = []

    def noted(*arguments: Any) -> bool:
        outcomes.append(direct_io.move_direct(*arguments))
        return outcomes[-1]

    monkeypatch.setattr(page_file, "move_direct", noted)
    return outcomes


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_file, "in_cache", lambda *_: False)


@pytest.mark.usefixtures("cold")
@pytest.mark.parametrize("geometry", [WHOLE_BLOCKS, ODD], ids=["whole blocks", "odd"])
@pytest.mark.parametrize("direct", [True, False])
def test_store_04_a_page_comes_back_whichever_way_it_goes(
    tmp_path: Path, moved: list[bool], geometry: PageGeometry, direct: bool
) -> None:
    one = OnePage(tmp_path, geometry)
    one.write(direct)
    assert one.path.stat().st_size == one.layout.file_bytes
    assert one.read() == one.bytes
    tried = 0 if geometry is ODD else 1 + direct
    assert len(moved) == tried


def test_a_file_in_the_kernels_cache_is_read_from_it(tmp_path: Path, moved: list[bool]) -> None:
    one = OnePage(tmp_path, WHOLE_BLOCKS)
    one.write(direct=False)
    assert one.path.read_bytes()[-len(one.bytes) :] == one.bytes
    assert one.read() == one.bytes
    assert moved == []


@pytest.mark.usefixtures("cold")
def test_a_file_system_that_refuses_gets_plain_calls(
    tmp_path: Path, moved: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    change = fcntl.fcntl

    def refused(file: int, command: int, value: int = 0) -> int:
        if value & direct_io.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return change(file, command, value)

    monkeypatch.setattr(fcntl, "fcntl", refused)
    one = OnePage(tmp_path, WHOLE_BLOCKS)
    one.write(direct=True)
    assert one.read() == one.bytes
    assert moved == [False, False]


@pytest.mark.usefixtures("cold")
def test_a_damaged_byte_is_seen_past_the_cache(tmp_path: Path) -> None:
    one = OnePage(tmp_path, WHOLE_BLOCKS)
    one.write(direct=True)
    with one.path.open("r+b") as file:
        file.seek(one.layout.header_bytes + 5)
        file.write(bytes([one.bytes[5] ^ 1]))
    with pytest.raises(CorruptPageError, match="1 of 4 units"):
        one.read()


def test_a_dropped_file_is_not_in_the_cache(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(4 * BLOCK))
    file = os.open(path, os.O_RDWR)
    try:
        assert direct_io.in_cache(file, 4 * BLOCK)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        if direct_io.in_cache(file, 4 * BLOCK):
            pytest.skip(f"the file system of {tmp_path} keeps every file in memory, or this kernel can't tell")
    finally:
        os.close(file)
