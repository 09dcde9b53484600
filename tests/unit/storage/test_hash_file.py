"""STORE-04: files, and what can be wrong with them."""

import asyncio
import fcntl
import os
import resource
import stat
import threading
from pathlib import Path
from typing import get_args

import google_crc32c
import numpy as np
import pytest

from services.storage import disk_room, page_batch, plain_files, test_hooks
from services.storage.page_file import BLOCK, PageFormat
from shared.errors import StorageError
from shared.geometry import HostLayout, PageGeometry, Part
from shared.host_layout import units_of
from tests.unit.storage.conftest import MakeStore
from tests.unit.storage.pages import (
    FILE_BYTES,
    GEOMETRY,
    GO,
    MODEL,
    Page,
    disk_bytes,
    exists,
    flip,
    get,
    hits,
    page_files,
    put,
)


async def test_store_04_a_restart_hits(make_store: MakeStore) -> None:
    store = await make_store()
    await put(await store.of_model(MODEL, GEOMETRY), *range(20))
    await store.close()
    again = await make_store()
    pages = await again.of_model(MODEL, GEOMETRY)
    assert await exists(pages, *range(20)) == 20
    assert await hits(pages, *range(20)) == [True] * 20
    assert again.info.backend_id == store.info.backend_id
    assert again.stats()["l3_bytes"] == store.stats()["l3_bytes"] == disk_bytes(store.folder)


async def test_store_04_files_are_private_and_named_by_model_and_digest(make_store: MakeStore) -> None:
    store = await make_store()
    await put(await store.of_model(MODEL, GEOMETRY), 3)
    digest = Page(3).digest.hex()
    path = store.folder / MODEL.hex()[:16] / digest[:2] / f"{digest}.page"
    assert path.read_bytes()[BLOCK:] == Page(3).bytes
    for each in (store.folder, path.parent.parent, path.parent):
        assert stat.S_IMODE(each.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not list(store.folder.rglob("*.tmp"))


async def test_a_folder_that_everybody_may_write_is_named_in_the_log(
    make_store: MakeStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await make_store()
    assert "folder_writable_by_all" not in caplog.text
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    await make_store(folder=tmp_path / "open")
    assert "folder_writable_by_all" in caplog.text


async def test_store_04_a_digest_is_never_rewritten(make_store: MakeStore) -> None:
    store = await make_store()
    other = await make_store()
    pages = await store.of_model(MODEL, GEOMETRY)
    await put(pages, 0)
    [path] = page_files(store.folder)
    before = path.stat()
    assert await put(pages, 0) == [True]
    assert await put(await other.of_model(MODEL, GEOMETRY), 0) == [True]  # its index doesn't know the file yet
    assert path.stat().st_ino == before.st_ino
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert store.stats()["l3_set_pages"] == 1
    assert other.stats()["l3_bytes"] == before.st_blocks * 512


async def test_store_04_a_pipe_in_a_files_place_is_a_miss_and_holds_no_thread(make_store: MakeStore) -> None:
    store = await make_store()
    pages = await store.of_model(MODEL, GEOMETRY)
    await put(pages, 0, 1)
    path = next(path for path in page_files(store.folder) if path.stem == Page(0).digest.hex())
    path.unlink()
    os.mkfifo(path)
    async with asyncio.timeout(5):
        assert await hits(pages, 0, 1) == [False, True]


async def test_store_04_a_page_under_anothers_name_is_a_miss(make_store: MakeStore) -> None:
    store = await make_store()
    pages = await store.of_model(MODEL, GEOMETRY)
    await put(pages, 0, 1)
    paths = {path.stem: path for path in page_files(store.folder)}
    first, second = paths[Page(0).digest.hex()], paths[Page(1).digest.hex()]
    first.write_bytes(second.read_bytes())
    assert await hits(pages, 0, 1) == [False, True]


async def test_store_04_quarantine_is_bounded(make_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_room, "QUARANTINED_KEPT", 3)
    store = await make_store()
    pages = await store.of_model(MODEL, GEOMETRY)
    for n in range(6):
        await put(pages, n)
        os.truncate(page_files(store.folder)[0], 10)
        await get(pages, n)
    kept = sorted((store.folder / "quarantine").iterdir())
    assert [path.name.split("-")[2] for path in kept] == [f"{Page(n).digest.hex()}.page" for n in (3, 4, 5)]
    monkeypatch.setattr(disk_room, "QUARANTINED_KEPT", 1)
    again = await make_store()
    assert len(list((again.folder / "quarantine").iterdir())) == 1
    assert again.stats()["l3_bytes"] == disk_bytes(again.folder)


async def test_store_04_a_bad_file_that_cannot_be_moved_stays_a_miss(
    make_store: MakeStore, immovable: set[Path]
) -> None:
    store = await make_store()
    pages = await store.of_model(MODEL, GEOMETRY)
    await put(pages, 0)
    [path] = page_files(store.folder)
    os.truncate(path, 10)
    immovable.add(path)
    assert (await get(pages, 0)).corrupt == 1
    assert await exists(pages, 0) == 0
    assert (await get(pages, 0)).corrupt == 0
    assert store.stats()["l3_remove_failed"] == 1
    assert await put(pages, 0) == [True]
    assert await hits(pages, 0) == [True]


async def test_store_04_an_entry_whose_file_is_gone_is_a_miss(make_store: MakeStore) -> None:
    store = await make_store()
    pages = await store.of_model(MODEL, GEOMETRY)
    await put(pages, 0, 1)
    page_files(store.folder)[0].unlink()
    assert sorted(await hits(pages, 0, 1)) == [False, True]
    assert store.stats()["l3_bytes"] == disk_bytes(store.folder)
    assert store.stats()["l3_corrupt"] == 0


async def test_store_04_another_instances_files_are_seen_and_lost(make_store: MakeStore) -> None:
    store, other = await make_store(), await make_store()
    pages, others = await store.of_model(MODEL, GEOMETRY), await other.of_model(MODEL, GEOMETRY)
    assert store.info.backend_id == other.info.backend_id
    for n in range(10):  # one after the other, in folders whose time may not have moved on
        await put(others, n)
        await store.refresh()
        assert await exists(pages, *range(n + 1)) == n + 1
    assert await hits(pages, *range(10)) == [True] * 10
    await others.remove([Page(n).digest for n in range(10)])
    await store.refresh()
    assert await exists(pages, 0) == 0
    assert store.stats()["l3_bytes"] == 0


async def test_store_04_a_refresh_lists_only_folders_that_changed(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await make_store()
    await put(await store.of_model(MODEL, GEOMETRY), *range(50))
    for path in store.folder.glob("*/??"):
        os.utime(path, (1, 1))  # changed long ago
    await store.refresh()
    listed = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: listed.append(Path(path).name) or scandir(path))
    await store.refresh()
    assert [name for name in listed if name not in ("l3", MODEL.hex()[:16])] == []
    assert store.stats()["l3_files"] == 50


async def test_store_04_two_writers_of_one_digest_end_with_one_good_file(make_store: MakeStore) -> None:
    stores = [await make_store() for _ in range(2)]
    both = [await store.of_model(MODEL, GEOMETRY) for store in stores]
    results = await asyncio.gather(*(put(pages, *range(30)) for pages in both for _ in range(2)))
    assert results == [[True] * 30] * 4
    assert len(page_files(stores[0].folder)) == 30
    assert not list(stores[0].folder.rglob("*.tmp"))
    for store, pages in zip(stores, both, strict=True):
        assert await hits(pages, *range(30)) == [True] * 30
        assert store.stats()["l3_bytes"] == disk_bytes(store.folder)


async def test_store_04_a_dead_writers_leftovers_go_a_living_ones_stay(make_store: MakeStore) -> None:
    store = await make_store()
    await put(await store.of_model(MODEL, GEOMETRY), 0)
    dead = page_files(store.folder)[0].with_suffix(".1-2.tmp")
    dead.write_bytes(b"half")
    alive = dead.with_suffix(".1-3.tmp")
    with alive.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        await make_store()
        assert not dead.exists()
        assert alive.exists()
    assert store.stats()["l3_files"] == 1


async def test_store_04_a_failed_write_leaves_nothing(make_store: MakeStore) -> None:
    store = await make_store()
    pages = await store.of_model(MODEL, GEOMETRY)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES - 1, hard))  # the system refuses the last byte
    try:
        assert await put(pages, 0, 1) == [False, False]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(store.folder.rglob("*.tmp"))
    assert not page_files(store.folder)
    assert (store.stats()["l3_dropped"], store.stats()["l3_bytes"]) == (2, 0)
    assert await put(pages, 0, 1) == [True, True]
    assert store.stats()["l3_bytes"] == disk_bytes(store.folder)


async def test_a_page_whose_folder_never_comes_is_counted(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await make_store()
    pages = await store.of_model(MODEL, GEOMETRY)
    monkeypatch.setattr(plain_files, "make_folder", lambda *_, **__: None)
    assert await put(pages, 0, 1) == [False, False]
    assert (store.stats()["l3_dropped"], store.stats()["l3_bytes"]) == (2, 0)


@pytest.mark.parametrize("call_bytes", [999, 4096, 5000])
async def test_store_04_short_reads_and_writes_are_continued(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch, call_bytes: int
) -> None:
    monkeypatch.setattr(page_batch, "CALL_BYTES", call_bytes)
    pages = await (await make_store()).of_model(MODEL, GEOMETRY)
    assert await put(pages, 0) == [True]
    assert await hits(pages, 0) == [True]


async def test_store_04_without_checksums_the_bytes_are_taken_as_they_are(make_store: MakeStore) -> None:
    store = await make_store(verify=False)
    pages = await store.of_model(MODEL, GEOMETRY)
    await put(pages, 0)
    [path] = page_files(store.folder)
    path.write_bytes(flip(BLOCK, path.read_bytes()))
    buffer = memoryview(bytearray(GEOMETRY.page_bytes))
    read = await pages.batch_get([Page(0).digest], [buffer], GO)
    assert read.checksums[0] is not None
    assert bytes(buffer) != Page(0).bytes


def test_store_04_a_header_has_room_for_every_unit() -> None:
    big = PageGeometry(16, 1200, (Part("k", 1, 8, "float32"), Part("v", 1, 8, "float32")))
    layout = PageFormat(MODEL, big)
    assert layout.header_bytes == 3 * BLOCK
    assert len(layout.header(b"d" * 32, np.zeros(2400, np.uint32), memoryview(b""))) == 3 * BLOCK


async def test_a_folder_that_cannot_be_used_is_refused_by_name(make_store: MakeStore, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"set storage\.folder"):
        await make_store(folder=tmp_path / "file" / "l3")


def test_the_numbers_of_these_tests() -> None:
    assert PageFormat(MODEL, GEOMETRY).file_bytes == FILE_BYTES


async def test_a_cancelled_batch_begins_no_further_page(make_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its buffers are host pages, and belong to somebody else soon."""
    store = await make_store()
    pages = await store.of_model(MODEL, GEOMETRY)
    await put(pages, *range(8))
    begun: list[Path] = []
    first, let_go = threading.Event(), threading.Event()

    def slow(path: Path) -> None:
        begun.append(path)
        first.set()
        let_go.wait(10)

    monkeypatch.setattr(test_hooks, "active", lambda: True)
    monkeypatch.setattr(test_hooks, "before_read", slow)
    batch = asyncio.create_task(get(pages, *range(8)))
    assert await asyncio.to_thread(first.wait, 10)
    batch.cancel()
    await asyncio.wait([batch])
    let_go.set()
    store.readers.shutdown(wait=True)
    assert 1 <= len(begun) <= store.io_threads


async def test_a_batch_of_nothing_is_done_at_once(make_store: MakeStore) -> None:
    pages = await (await make_store()).of_model(MODEL, GEOMETRY)
    assert await put(pages) == []
    assert (await get(pages)).checksums == []
    assert await pages.remove([]) == 0


@pytest.mark.parametrize("layout", get_args(HostLayout))
@pytest.mark.parametrize("dims", [(8, 8), (8, 4), (4, 8, 2)])
def test_checksums_are_in_the_order_of_the_units(dims: tuple[int, ...], layout: HostLayout) -> None:
    parts = tuple(Part(f"part{at}", 2, dim, "float32") for at, dim in enumerate(dims))
    geometry = PageGeometry(4, 3, parts, layout=layout)
    page = np.random.default_rng(1).bytes(geometry.page_bytes)
    wanted = []
    for unit in units_of(geometry):
        starts = [unit.start + run * unit.stride for run in range(unit.runs)]
        wanted.append(google_crc32c.value(b"".join(page[start : start + unit.run_bytes] for start in starts)))
    assert PageFormat(MODEL, geometry).checksums_of(memoryview(page)).tolist() == wanted
