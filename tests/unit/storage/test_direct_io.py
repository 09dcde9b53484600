"""Page files past the kernel's cache: the same bytes, and a way back where it is impossible."""

import errno
import fcntl
import mmap
import os
import secrets
from pathlib import Path

import numpy as np
import pytest

from services.storage import direct_io
from services.storage.direct_io import BLOCK
from services.storage.page_batch import DONE, PageBatch, Policy
from services.storage.page_file import CorruptPageError, PageFormat
from shared.geometry import PageGeometry, Part
from shared.segments import Checksums

MODEL = bytes(range(32))
WHOLE_BLOCKS = PageGeometry(64, 2, (Part("k", 4, 8, "bfloat16"), Part("v", 4, 8, "bfloat16")))
ODD = PageGeometry(1, 2, (Part("k", 1, 3, "float16"), Part("v", 1, 5, "float16")))

pytestmark = pytest.mark.usefixtures("version")


class OnePage:
    """A page in memory that begins on a block, and its file."""

    def __init__(self, folder: Path, geometry: PageGeometry) -> None:
        self.layout, self.path, self.digest = PageFormat(MODEL, geometry), folder / "one.page", bytes(32)
        self.bytes = secrets.token_bytes(geometry.page_bytes)
        self.checksums: Checksums = self.layout.checksums_of(memoryview(self.bytes))

    def write(self, direct: bool, *, fsync: bool = False) -> bool:
        """True if it went past the cache."""
        batch = self._batch(self.memory(self.bytes), Policy(True, direct, fsync), [self.checksums])
        assert batch.write(0, 1) == 1
        assert list(batch.outcomes) == [DONE]
        assert batch.lengths[0] == self.path.stat().st_blocks * 512
        return bool(batch.past_cache[0])

    def read(self) -> tuple[bytes, bool]:
        """Its bytes, and whether they came past the cache. Raises what is wrong with it."""
        page = self.memory()
        batch = self._batch(page, Policy())
        assert batch.read(0, 1) == 1
        if batch.outcomes[0] != DONE:
            raise batch.error(0)
        [checksums] = batch.checksums()
        np.testing.assert_array_equal(checksums, self.checksums)
        return bytes(page), bool(batch.past_cache[0])

    def memory(self, content: bytes = b"") -> memoryview:
        memory = mmap.mmap(-1, self.layout.page_bytes)
        memory[: len(content)] = content
        return memoryview(memory)

    def drop_from_cache(self) -> None:
        file = os.open(self.path, os.O_RDWR)
        try:
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            if direct_io.in_cache(file, self.layout.file_bytes):
                pytest.skip(f"the file system of {self.path} keeps every file in memory, or this kernel can't tell")
        finally:
            os.close(file)

    def _batch(self, page: memoryview, policy: Policy, checksums: list[Checksums] | None = None) -> PageBatch:
        names = [str(self.path)], [self.digest], [page]
        return PageBatch(self.layout, *names, policy, checksums or [], [f"{self.path}.tmp"] if checksums else [])


@pytest.mark.parametrize("geometry", [WHOLE_BLOCKS, ODD], ids=["whole blocks", "odd"])
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("fsync", [True, False])
def test_store_04_a_page_comes_back_whichever_way_it_goes(
    tmp_path: Path, geometry: PageGeometry, direct: bool, fsync: bool
) -> None:
    one = OnePage(tmp_path, geometry)
    assert one.write(direct, fsync=fsync) == (direct and geometry is WHOLE_BLOCKS)
    assert one.path.stat().st_size == one.layout.file_bytes
    assert [path.name for path in tmp_path.iterdir()] == ["one.page"]
    one.drop_from_cache()
    assert one.read() == (one.bytes, geometry is WHOLE_BLOCKS)


def test_a_file_in_the_kernels_cache_is_read_from_it(tmp_path: Path) -> None:
    one = OnePage(tmp_path, WHOLE_BLOCKS)
    one.write(direct=False)
    assert one.path.read_bytes()[-len(one.bytes) :] == one.bytes
    assert one.read() == (one.bytes, False)


@pytest.mark.parametrize("version", ["plain"], indirect=True)
def test_a_file_system_that_refuses_gets_plain_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change, refusals = fcntl.fcntl, []

    def refused(file: int, command: int, value: int = 0) -> int:
        if value & direct_io.O_DIRECT:
            refusals.append(file)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return change(file, command, value)

    monkeypatch.setattr(fcntl, "fcntl", refused)
    one = OnePage(tmp_path, WHOLE_BLOCKS)
    assert not one.write(direct=True)
    one.drop_from_cache()
    assert one.read() == (one.bytes, False)
    assert len(refusals) == 2


@pytest.mark.parametrize("version", ["c"], indirect=True)
def test_memory_that_the_file_system_refuses_gets_plain_calls(tmp_path: Path) -> None:
    class Unaligned(OnePage):
        def memory(self, content: bytes = b"") -> memoryview:
            memory = mmap.mmap(-1, self.layout.page_bytes + BLOCK)
            memory[100 : 100 + len(content)] = content
            return memoryview(memory)[100 : 100 + self.layout.page_bytes]

    one = Unaligned(tmp_path, WHOLE_BLOCKS)
    assert not one.write(direct=True)
    one.drop_from_cache()
    assert one.read() == (one.bytes, False)


@pytest.mark.parametrize("cold", [True, False])
def test_a_damaged_byte_is_seen_past_the_cache(tmp_path: Path, cold: bool) -> None:
    one = OnePage(tmp_path, WHOLE_BLOCKS)
    one.write(direct=True)
    with one.path.open("r+b") as file:
        file.seek(one.layout.header_bytes + 5)
        file.write(bytes([one.bytes[5] ^ 1]))
    if cold:
        one.drop_from_cache()
    with pytest.raises(CorruptPageError, match="1 of 4 units"):
        one.read()


def test_a_files_time_is_renewed_by_a_read_when_it_is_old(tmp_path: Path) -> None:
    one = OnePage(tmp_path, WHOLE_BLOCKS)
    one.write(direct=True)
    before = one.path.stat().st_mtime_ns
    one.read()
    assert one.path.stat().st_mtime_ns == before
    os.utime(one.path, (1, 1))
    one.read()
    assert one.path.stat().st_mtime_ns >= before


@pytest.mark.parametrize("page", [memoryview(bytearray(10)), memoryview(bytes(WHOLE_BLOCKS.page_bytes))])
def test_memory_that_no_page_can_be_read_into_is_refused(page: memoryview) -> None:
    with pytest.raises(ValueError, match=f"for a page of {WHOLE_BLOCKS.page_bytes}"):
        PageBatch(PageFormat(MODEL, WHOLE_BLOCKS), ["one.page"], [bytes(32)], [page], Policy())
