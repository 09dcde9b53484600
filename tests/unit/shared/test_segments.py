"""Host-pool segments: names, locks, and what happens when either side dies."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from shared.errors import CapacityError, SegmentError
from shared.geometry import PageGeometry, Part
from shared.messages.storage import Holder, SegmentInfo
from shared.segment_files import list_holders, remove_stale_segments
from shared.segments import HEADER, MappedSegment, OwnedSegment, create_segment, map_segment

GEOMETRY = PageGeometry(16, 2, (Part("k", 2, 8, "float32"), Part("v", 2, 8, "float32")))
MODEL = b"m" * 32
EPOCH = 1_000
HOLD = """
import sys, time
import msgspec
from shared.messages.storage import SegmentInfo
from shared.segments import map_segment
segment = map_segment(msgspec.msgpack.decode(bytes.fromhex(sys.argv[1]), type=SegmentInfo), "worker-0", 7)
segment.pages_array[1] = 9
print("mapped", flush=True)
time.sleep(60)
"""


def make(folder: Path, epoch: int = EPOCH, pages: int = 8) -> OwnedSegment:
    return create_segment(folder, "storage-0", "stack", epoch, GEOMETRY, MODEL, pages)


@pytest.fixture
def owned(tmp_path: Path) -> Iterator[OwnedSegment]:
    segment = make(tmp_path)
    yield segment
    segment.close()


@pytest.fixture
def mapped(owned: OwnedSegment) -> Iterator[MappedSegment]:
    segment = map_segment(owned.info("storage-0"), "worker-0", 5)
    yield segment
    segment.close()


def some_checksums(pages: int) -> np.ndarray:
    return np.arange(pages * GEOMETRY.units, dtype=np.uint32).reshape(pages, GEOMETRY.units)


def test_both_sides_see_the_same_bytes(owned: OwnedSegment, mapped: MappedSegment) -> None:
    assert mapped.pages_array.shape == (8, GEOMETRY.page_bytes)
    mapped.pages_array[3] = 7
    assert (owned.pages_array[3] == 7).all()
    owned.pages_array[4] = 8
    assert (mapped.pages_array[4] == 8).all()


def test_names_are_seen_by_the_mapper_who_cannot_write_them(owned: OwnedSegment, mapped: MappedSegment) -> None:
    pages = np.array([2, 5], dtype=np.int32)
    owned.set_names(pages, b"a" * 32 + b"b" * 32, some_checksums(2))
    name = mapped.name_of(5)
    assert name is not None
    assert name.digest == b"b" * 32
    assert (name.checksums == some_checksums(2)[1]).all()
    assert owned.named_pages() == 2
    owned.clear_names(np.array([5, 6], dtype=np.int32))
    assert mapped.name_of(5) is None
    assert mapped.name_of(6) is None
    assert mapped.name_of(2) is not None
    with pytest.raises(ValueError):
        mapped._rows()["state"][2] = 0


def test_the_names_of_many_pages_are_read_at_once(owned: OwnedSegment, mapped: MappedSegment) -> None:
    owned.set_names(np.array([2, 5], dtype=np.int32), b"a" * 32 + b"b" * 32, some_checksums(2))
    owned.set_names(np.array([6], dtype=np.int32), b"c" * 32, some_checksums(1))
    owned.clear_names(np.array([6], dtype=np.int32))
    names = mapped.names_of(np.array([5, 3, 2, 6]))
    assert names.named.tolist() == [True, False, True, False]
    assert [row.tobytes() for row in names.digests[[0, 2]]] == [b"b" * 32, b"a" * 32]
    assert (names.checksums[[2, 0]] == some_checksums(2)).all()
    with pytest.raises(SegmentError, match=r"outside 1\.\.7"):
        mapped.names_of(np.array([5, 8]))


def test_a_name_that_changes_while_it_is_read_is_no_name(owned: OwnedSegment, mapped: MappedSegment) -> None:
    page = np.array([2], dtype=np.int32)
    owned.set_names(page, b"a" * 32, some_checksums(1))
    state = int(mapped._rows()["state"][2])
    owned.set_names(page, b"b" * 32, some_checksums(1))
    assert int(mapped._rows()["state"][2]) not in (state, state + 1)
    owned._rows()["state"][2] += 1  # what a reader sees in the middle of a change
    assert mapped.name_of(2) is None


@pytest.mark.parametrize("page", [0, 8, -1])
def test_a_page_outside_the_segment_is_refused(owned: OwnedSegment, page: int) -> None:
    with pytest.raises(SegmentError, match=r"outside 1\.\.7"):
        owned.name_of(page)
    with pytest.raises(SegmentError, match=r"outside 1\.\.7"):
        owned.set_names(np.array([page], dtype=np.int32), b"a" * 32, some_checksums(1))


def test_memory_is_allocated_as_a_whole(owned: OwnedSegment) -> None:
    assert owned.path.stat().st_blocks * 512 >= owned.size
    assert owned.path.stat().st_mode & 0o777 == 0o600


def test_an_existing_segment_is_never_opened_again(tmp_path: Path, owned: OwnedSegment) -> None:
    with pytest.raises(SegmentError, match="never opened twice"):
        make(tmp_path)
    assert owned.path.exists()


def test_a_pool_that_does_not_fit_is_refused_with_the_numbers(tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match=rf"needs \d+ bytes \({10**12} pages .* free: lower cache.host_bytes"):
        make(tmp_path, pages=10**12)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_during_creation_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CapacityError, match=r"lower cache\.host_bytes"):
        make(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_pool_of_one_page_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match=r"raise cache\.host_bytes"):
        make(tmp_path, pages=1)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"epoch": EPOCH + 1}, "epoch"),
        ({"model_fingerprint": b"n" * 32}, "model fingerprint"),
        ({"geometry": PageGeometry(16, 2, (Part("k", 4, 4, "float32"), Part("v", 2, 8, "float32")))}, "geometry"),
        ({"pages": 9}, "bytes instead of"),
        ({"path": "/nonexistent/kvtide.a.b.1"}, "can't hold"),
    ],
)
def test_a_mapper_refuses_a_segment_that_differs(owned: OwnedSegment, change: dict[str, object], what: str) -> None:
    info = owned.info("storage-0")
    fields = {name: getattr(info, name) for name in info.__struct_fields__}
    with pytest.raises(SegmentError, match=what):
        map_segment(SegmentInfo(**{**fields, **change}), "worker-0", 5)
    assert list_holders(owned.path.parent, "stack", "storage-0") == ([], [])


def test_a_file_that_is_no_segment_is_refused(owned: OwnedSegment) -> None:
    owned.pages_array[0, : HEADER.size] = 0
    with pytest.raises(SegmentError, match="magic"):
        map_segment(owned.info("storage-0"), "worker-0", 5)


def test_a_mapper_is_listed_while_it_maps(owned: OwnedSegment, mapped: MappedSegment) -> None:
    folder = owned.path.parent
    assert list_holders(folder, "stack", "storage-0").held == [Holder("worker-0", 5, EPOCH)]
    assert list_holders(folder, "stack", "storage-1") == ([], [])
    with pytest.raises(SegmentError, match="once"):
        map_segment(owned.info("storage-0"), "worker-0", 5)
    mapped.close()
    assert list_holders(folder, "stack", "storage-0") == ([], [])
    map_segment(owned.info("storage-0"), "worker-0", 5).close()


def test_a_mapper_is_listed_until_its_last_array_is_gone(owned: OwnedSegment, mapped: MappedSegment) -> None:
    view = mapped.pages_array[1:3]
    mapped.close()
    mapped.close()
    view[:] = 3
    assert (owned.pages_array[1] == 3).all()
    assert len(list_holders(owned.path.parent, "stack", "storage-0").held) == 1
    del view
    assert list_holders(owned.path.parent, "stack", "storage-0").held == []
    with pytest.raises(SegmentError, match="closed"):
        _ = mapped.pages_array


def test_a_killed_mapper_is_noticed_once(owned: OwnedSegment) -> None:
    text = msgspec.msgpack.encode(owned.info("storage-0")).hex()
    folder, holder = owned.path.parent, Holder("worker-0", 7, EPOCH)
    with subprocess.Popen([sys.executable, "-c", HOLD, text], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"mapped\n"
        assert list_holders(folder, "stack", "storage-0") == ([holder], [])
        process.send_signal(signal.SIGKILL)
    assert (owned.pages_array[1] == 9).all()
    assert list_holders(folder, "stack", "storage-0") == ([], [holder])
    assert list_holders(folder, "stack", "storage-0") == ([], [])


def test_a_map_survives_the_owners_unlink(owned: OwnedSegment, mapped: MappedSegment) -> None:
    owned.pages_array[1] = 4
    owned.unlink()
    owned.unlink()
    owned.close()
    assert (mapped.pages_array[1] == 4).all()
    mapped.pages_array[7] = 5


def test_a_successor_removes_what_a_dead_storage_left(tmp_path: Path, owned: OwnedSegment) -> None:
    mapped = map_segment(owned.info("storage-0"), "worker-0", 5)
    other = create_segment(tmp_path, "storage-1", "stack", EPOCH, GEOMETRY, MODEL, 4)
    with pytest.raises(SegmentError, match="is running"):
        remove_stale_segments(tmp_path, "stack", "storage-0")
    owned.close()
    assert remove_stale_segments(tmp_path, "stack", "storage-0") == [(EPOCH, 8 * GEOMETRY.page_bytes)]
    assert not owned.path.exists()
    assert other.path.exists()
    mapped.pages_array[7] = 5
    mapped.close()
    other.close()
    assert remove_stale_segments(tmp_path, "stack", "storage-1") == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("identity", ["", "a.b", "a/b", "x" * 65])
def test_an_identity_that_cannot_name_a_file_is_refused(tmp_path: Path, identity: str) -> None:
    with pytest.raises(SegmentError, match="letters, digits"):
        create_segment(tmp_path, identity, "stack", 1, GEOMETRY, MODEL, 4)
