"""The page table of a mapped pool, filled ahead of its first use."""

import mmap
import re
from pathlib import Path

import numpy as np
import pytest

from shared import populate
from shared.errors import SegmentError

JOIN_S = 30.0
SIZE = 3 * populate.STEP_BYTES // 2  # a whole step and a part of one


def resident(memory: mmap.mmap) -> int:
    """Bytes of the map that this process has in its page table."""
    address = np.frombuffer(memory, np.uint8).ctypes.data
    text = Path("/proc/self/smaps").read_text()
    match = re.search(rf"^{address:x}-.*?^Rss: +(\d+) kB", text, re.MULTILINE | re.DOTALL)
    assert match is not None
    return int(match[1]) * 1024


def test_every_page_is_there_and_no_byte_has_changed(caplog: pytest.LogCaptureFixture) -> None:
    memory = mmap.mmap(-1, SIZE)
    memory[5] = 7
    array = np.frombuffer(memory, np.uint8).reshape(-1, 4096)
    assert resident(memory) < SIZE
    with caplog.at_level("INFO", "kvtide.segments"):
        populate.populate(lambda: array).join(JOIN_S)
    if "not_populated" in caplog.text:
        pytest.skip("this kernel has no MADV_POPULATE_WRITE")
    assert resident(memory) == SIZE
    assert memory[5] == 7
    assert not array[1:].any()


def test_it_ends_when_the_segment_is_closed() -> None:
    array = np.frombuffer(mmap.mmap(-1, 100 * populate.STEP_BYTES), np.uint8).reshape(-1, 4096)
    calls: list[int] = []

    def pages() -> np.ndarray:
        calls.append(1)
        if len(calls) > 2:
            raise SegmentError("closed")
        return array

    thread = populate.populate(pages)
    thread.join(JOIN_S)
    assert not thread.is_alive()
    assert len(calls) == 3
