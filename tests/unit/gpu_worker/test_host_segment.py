"""What a worker that leaves a host pool leaves behind: nothing."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from services.gpu_worker import host_segment
from services.gpu_worker.host_segment import MappedHostSegment
from shared.geometry import PageGeometry, Part
from shared.host_layout import Bytes
from shared.segments import create_segment

STEP_S = 0.2
GEOMETRY = PageGeometry(16, 2, (Part("k", 2, 8, "float32"), Part("v", 2, 8, "float32")))


def test_a_pool_is_unmapped_when_close_returns_though_it_was_being_populated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that ends right after must not leave its lock file."""

    def slow(pages: Callable[[], Bytes]) -> threading.Thread:
        def step() -> None:
            array = pages()
            time.sleep(STEP_S)
            del array

        thread = threading.Thread(target=step)
        thread.start()
        return thread

    monkeypatch.setattr(host_segment, "populate", slow)
    owned = create_segment(tmp_path, "storage-0", "test", 7, GEOMETRY, b"m" * 32, 8)
    mapped = MappedHostSegment(owned.info("storage-0"), "gpu_worker-0", 9)
    assert list(tmp_path.glob("*gpu_worker-0*.lock"))
    mapped.close()
    assert not list(tmp_path.glob("*gpu_worker-0*.lock"))
    owned.unlink()
    owned.close()
