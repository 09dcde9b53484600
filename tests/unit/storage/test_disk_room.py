"""STORE-04 and SC-27: the quota and the free-space floor."""

import os
from pathlib import Path

from services.storage import disk_room
from tests.unit.storage.conftest import MakeStore
from tests.unit.storage.pages import FILE_BYTES, GEOMETRY, MODEL, Page, disk_bytes, exists, hits, page_files, put


async def test_sc_27_quota_10_pages_write_100_one_cannot_be_removed(
    make_store: MakeStore, immovable: set[Path]
) -> None:
    store = await make_store(quota_pages=10)
    pages = await store.of_model(MODEL, GEOMETRY)
    for n in range(100):
        assert await put(pages, n) == [True]
        if n == 0:
            immovable.add(page_files(store.folder)[0])
        assert store.stats()["l3_bytes"] == disk_bytes(store.folder) <= 10 * FILE_BYTES
    stats = store.stats()
    assert stats["l3_files"] == 10
    assert stats["l3_evicted"] == 90
    assert stats["l3_remove_failed"] > 0
    assert await hits(pages, 0, *range(91, 100)) == [True] * 10
    await store.close()

    again = await make_store(quota_pages=10)
    assert again.stats()["l3_bytes"] == disk_bytes(store.folder) == 10 * FILE_BYTES
    pages = await again.of_model(MODEL, GEOMETRY)
    assert await put(pages, 200) == [True]
    assert again.stats()["l3_bytes"] == disk_bytes(store.folder) == 10 * FILE_BYTES


async def test_store_04_a_smaller_quota_holds_from_the_start(make_store: MakeStore) -> None:
    store = await make_store(quota_pages=10)
    await put(await store.of_model(MODEL, GEOMETRY), *range(10))
    for age, n in enumerate(range(10)):
        [path] = [each for each in page_files(store.folder) if each.stem == Page(n).digest.hex()]
        os.utime(path, (age + 1000, age + 1000))
    await store.close()
    again = await make_store(quota_pages=4)
    assert disk_bytes(again.folder) == 4 * FILE_BYTES
    assert await exists(await again.of_model(MODEL, GEOMETRY), *range(6, 10)) == 4


async def test_store_04_the_quota_counts_every_model(make_store: MakeStore) -> None:
    store = await make_store(quota_pages=10)
    await put(await store.of_model(MODEL, GEOMETRY), *range(10))
    await put(await store.of_model(b"n" * 32, GEOMETRY), *range(8))
    assert len(page_files(store.folder)) == 10
    assert store.stats()["l3_bytes"] == disk_bytes(store.folder) == 10 * FILE_BYTES


async def test_store_04_the_least_recently_used_goes_first(make_store: MakeStore) -> None:
    store = await make_store(quota_pages=3)
    pages = await store.of_model(MODEL, GEOMETRY)
    await put(pages, 0)
    await put(pages, 1)
    await put(pages, 2)
    assert await hits(pages, 0) == [True]
    assert await exists(pages, 1) == 1
    await put(pages, 3)
    assert await hits(pages, 0, 1, 2, 3) == [True, True, False, True]


async def test_store_04_a_hit_counts_after_a_restart(make_store: MakeStore) -> None:
    store = await make_store(quota_pages=3)
    pages = await store.of_model(MODEL, GEOMETRY)
    await put(pages, 0, 1, 2)
    for path in page_files(store.folder):
        os.utime(path, (1000, 1000))
    await hits(pages, 1)
    await store.close()
    again = await make_store(quota_pages=3)
    pages = await again.of_model(MODEL, GEOMETRY)
    await put(pages, 3, 4)
    assert await exists(pages, 1) == 1


async def test_store_04_a_page_that_finds_no_room_is_dropped_and_counted(
    make_store: MakeStore, immovable: set[Path]
) -> None:
    store = await make_store(quota_pages=2)
    pages = await store.of_model(MODEL, GEOMETRY)
    await put(pages, 0, 1)
    immovable.update(page_files(store.folder))
    assert await put(pages, 2) == [False]
    assert store.stats()["l3_dropped"] == 1
    assert await hits(pages, 0, 1) == [True, True]
    immovable.clear()
    assert await put(pages, 2) == [True]


async def test_store_04_a_page_larger_than_the_quota_evicts_nothing(make_store: MakeStore) -> None:
    store = await make_store(quota_pages=2)
    await put(await store.of_model(MODEL, GEOMETRY), 0, 1)
    again = await make_store(quota_pages=0, folder=store.folder.with_name("other"))
    assert await put(await again.of_model(MODEL, GEOMETRY), 0) == [False]
    assert len(page_files(store.folder)) == 2


async def test_store_04_the_free_space_floor_is_kept(make_store: MakeStore, monkeypatch) -> None:
    store = await make_store(quota_pages=100)
    pages = await store.of_model(MODEL, GEOMETRY)
    await put(pages, *range(6))
    disk = 8 * FILE_BYTES  # a disk with room for 8 pages, of which 4 must stay free

    def statvfs(_: object) -> os.statvfs_result:
        free = (disk - disk_bytes(store.folder)) // 4096
        return os.statvfs_result((4096, 4096, disk // 4096, free, free, 0, 0, 0, 0, 255))

    monkeypatch.setattr(disk_room.os, "statvfs", statvfs)
    store.room._floor = 4 * FILE_BYTES
    assert await put(pages, 6) == [True]
    assert disk_bytes(store.folder) == 4 * FILE_BYTES
    assert await hits(pages, 6) == [True]


async def test_store_04_bad_files_make_room_first(make_store: MakeStore, immovable: set[Path]) -> None:
    store = await make_store(quota_pages=3)
    pages = await store.of_model(MODEL, GEOMETRY)
    await put(pages, 0, 1, 2)
    path = next(each for each in page_files(store.folder) if each.stem == Page(0).digest.hex())
    path.write_bytes(bytes(FILE_BYTES))
    assert await hits(pages, 0) == [False]
    [bad] = (store.folder / "quarantine").iterdir()
    immovable.add(bad)
    assert await put(pages, 3) == [True]  # it evicts a good one: the bad one can't be removed
    assert store.stats()["l3_evicted"] == 1
    immovable.clear()
    assert await put(pages, 4) == [True]
    assert store.stats()["l3_evicted"] == 1
    assert not bad.exists()
    assert store.stats()["l3_bytes"] == disk_bytes(store.folder) == 3 * FILE_BYTES


async def test_metric_02_an_evicted_page_that_nobody_read_is_counted(make_store: MakeStore) -> None:
    store = await make_store(quota_pages=2)
    pages = await store.of_model(MODEL, GEOMETRY)
    await put(pages, 0, 1)
    await hits(pages, 0)
    await put(pages, 2, 3)
    assert (store.stats()["l3_evicted"], store.stats()["l3_evicted_unread"]) == (2, 1)
    await store.close()
    again = await make_store(quota_pages=2)
    await put(await again.of_model(MODEL, GEOMETRY), 4)
    assert again.stats()["l3_evicted_unread"] == 0  # what an earlier process has read isn't known
