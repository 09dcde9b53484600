"""STORE-04: page files that were flipped, cut or lengthened are misses, each counted, none of them served."""

import random

import pytest

from services.storage.page_file import BLOCK, FIXED
from tests.unit.storage.conftest import MakeStore
from tests.unit.storage.pages import (
    GEOMETRY,
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

DAMAGE = {
    "sc_24_truncated": lambda data: data[:-1],
    "empty": lambda data: b"",
    "header_only": lambda data: data[:BLOCK],
    "longer": lambda data: data + b"x",
    "magic": lambda data: flip(0, data),
    "version": lambda data: flip(8, data),
    "model": lambda data: flip(16, data),
    "digest": lambda data: flip(48, data),
    "length": lambda data: flip(80, data),
    "table": lambda data: flip(FIXED.size, data),
    "padding": lambda data: flip(BLOCK - 5, data),
    "first_byte": lambda data: flip(BLOCK, data),
    "last_byte": lambda data: flip(len(data) - 1, data),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
async def test_store_04_a_bad_file_is_a_miss_in_quarantine_and_the_next_read_works(
    make_store: MakeStore, damage
) -> None:
    store = await make_store()
    pages = await store.of_model(MODEL, GEOMETRY)
    await put(pages, 0, 1)
    path = next(path for path in page_files(store.folder) if path.stem == Page(0).digest.hex())
    path.write_bytes(damage(path.read_bytes()))
    read = await get(pages, 0, 1)
    assert [each is not None for each in read.checksums] == [False, True]
    assert read.corrupt == 1
    assert not path.exists()
    assert len(list((store.folder / "quarantine").iterdir())) == 1
    stats = store.stats()
    assert (stats["l3_corrupt"], stats["l3_quarantined"], stats["l3_files"]) == (1, 1, 1)
    assert stats["l3_bytes"] == disk_bytes(store.folder)
    assert await exists(pages, 0) == 0
    assert await put(pages, 0) == [True]
    assert await hits(pages, 0, 1) == [True, True]


CHECKSUMS = range(FIXED.size, FIXED.size + 4 * GEOMETRY.units)
# Of `chance` and a page file's bytes; each kind leaves a file that isn't the page any more.
RANDOM_DAMAGE = {
    "header": lambda chance, data: flip(chance.randrange(48), data),
    "name": lambda chance, data: flip(chance.randrange(48, 80), data),
    "lengths": lambda chance, data: flip(chance.randrange(80, FIXED.size), data),
    "checksum": lambda chance, data: flip(chance.choice(CHECKSUMS), data),
    "payload": lambda chance, data: flip(chance.randrange(BLOCK, len(data)), data),
    "payload and checksum": lambda chance, data: flip(CHECKSUMS[0], flip(chance.randrange(BLOCK, len(data)), data)),
    "zeros": lambda chance, data: data[:BLOCK].ljust(len(data), b"\0"),
    "empty": lambda chance, data: b"",
    "short": lambda chance, data: data[: chance.randrange(1, len(data))],
    "long": lambda chance, data: data + chance.randbytes(chance.randrange(1, len(data))),
}
DAMAGED, WHOLE, BATCH = 1000, 100, 100


async def test_store_04_of_a_thousand_damaged_files_none_is_served_and_each_is_counted(make_store: MakeStore) -> None:
    chance, kinds = random.Random(7), list(RANDOM_DAMAGE.values())
    writer = await make_store(quota_pages=2000)
    pages = await writer.of_model(MODEL, GEOMETRY)
    for start in range(0, DAMAGED + WHOLE, BATCH):
        assert all(await put(pages, *range(start, start + BATCH)))
    numbers = {Page(n).digest.hex(): n for n in range(DAMAGED + WHOLE)}
    for path in page_files(writer.folder):
        if (n := numbers[path.stem]) < DAMAGED:
            path.write_bytes(kinds[n % len(kinds)](chance, path.read_bytes()))
    successor = await make_store(quota_pages=2000)  # it finds the files as they are now
    for reader, first in ((writer, 0), (successor, DAMAGED // 2)):
        pages = await reader.of_model(MODEL, GEOMETRY)
        for start in range(first, first + DAMAGED // 2, BATCH):
            read = await get(pages, *range(start, start + BATCH))
            assert (read.checksums, read.corrupt, read.failed) == ([None] * BATCH, BATCH, 0)
        assert await hits(pages, *range(DAMAGED, DAMAGED + WHOLE)) == [True] * WHOLE
        assert reader.stats()["l3_corrupt"] == reader.stats()["l3_quarantined"] == DAMAGED // 2
        assert reader.stats()["l3_get_pages"] == WHOLE
    assert len(page_files(writer.folder)) == WHOLE
