"""The contract of STORE-02 and STORE-07, for every backend."""

import asyncio
import random
import threading
import time

import pytest

from services.storage.backend import MAX_BATCH, ModelPages
from services.storage.breaker import FAILURES_IN_A_ROW, FIRST_BACK_OFF_S, BreakerBackend
from tests.backends.rigs import HashFileRig, Rig
from tests.unit.storage.pages import GEOMETRY, GO, MODEL, Page, exists, get, hits, put

OTHER_MODEL = b"o" * 32


async def test_store_02_a_page_that_was_stored_can_be_read_in_order_and_no_other(pages: ModelPages) -> None:
    assert await put(pages, 0, 1, 2) == [True] * 3
    assert await hits(pages, 2, 7, 0, 8, 1) == [True, False, True, False, True]
    read = await get(pages, 7, 8)
    assert (read.checksums, read.corrupt, read.failed) == ([None, None], 0, 0)


async def test_store_02_exists_counts_leading_hits(pages: ModelPages) -> None:
    await put(pages, 0, 1, 3)
    assert await exists(pages, 0, 1, 2, 3) == 2
    assert await exists(pages, 2, 0) == 0
    assert await exists(pages) == 0


async def test_store_02_a_page_that_is_there_is_stored_again_with_success(pages: ModelPages) -> None:
    assert await put(pages, 0) == [True]
    assert await put(pages, 0, 1) == [True, True]
    assert await hits(pages, 0, 1) == [True, True]


async def test_store_02_removed_pages_are_misses(pages: ModelPages) -> None:
    await put(pages, 0, 1)
    assert await pages.remove([Page(0).digest, Page(9).digest]) == 1
    assert await exists(pages, 0) == 0
    assert await hits(pages, 0, 1) == [False, True]
    assert await put(pages, 0) == [True]
    assert await hits(pages, 0, 1) == [True, True]


async def test_store_02_clear_forgets_everything(backend: BreakerBackend, pages: ModelPages) -> None:
    await put(pages, 0, 1)
    await backend.clear()
    assert await exists(pages, 0) == 0
    assert await hits(pages, 0, 1) == [False, False]
    assert backend.stats().get("l3_bytes", 0) == 0


async def test_store_02_a_stopped_batch_does_nothing(pages: ModelPages) -> None:
    await put(pages, 0)
    stop = threading.Event()
    stop.set()
    page = Page(1)
    buffer = memoryview(bytearray(GEOMETRY.page_bytes))
    assert await pages.batch_set([page.digest], [buffer], [page.checksums], stop) == [False]
    assert (await pages.batch_get([Page(0).digest], [buffer], stop)).checksums == [None]
    assert bytes(buffer) == bytes(GEOMETRY.page_bytes)


async def test_store_02_a_batch_is_bounded_and_its_lists_match(pages: ModelPages) -> None:
    with pytest.raises(ValueError, match="at most 128"):
        await pages.batch_exists([b"d" * 32] * (MAX_BATCH + 1))
    with pytest.raises(ValueError, match="one length"):
        await pages.batch_get([b"d" * 32], [], threading.Event())


async def test_store_01_another_models_page_of_that_digest_is_a_miss(
    backend: BreakerBackend, pages: ModelPages
) -> None:
    others = await backend.of_model(OTHER_MODEL, GEOMETRY)
    await put(pages, 0)
    assert await exists(others, 0) == 0
    assert await hits(others, 0) == [False]
    await put(others, 1)
    assert await hits(pages, 0, 1) == [True, False]


async def test_store_01_another_models_bytes_under_this_models_key_are_a_miss(
    rig: Rig, backend: BreakerBackend, pages: ModelPages
) -> None:
    await put(await backend.of_model(OTHER_MODEL, GEOMETRY), 0)
    theirs = await rig.value(backend, 0, OTHER_MODEL)
    await put(pages, 0, 1)
    await rig.damage(backend, 0, lambda ours: theirs)
    read = await get(pages, 0, 1)
    assert [each is not None for each in read.checksums] == [False, True]
    assert read.corrupt == 1


SIZES = {"shorter": lambda data: data[:-1], "longer": lambda data: data + b"x", "header_only": lambda data: data[:50]}


@pytest.mark.parametrize("size", SIZES)
async def test_store_04_a_value_of_the_wrong_size_is_a_miss_and_can_be_replaced(
    rig: Rig, backend: BreakerBackend, pages: ModelPages, size: str
) -> None:
    await put(pages, 0, 1)
    await rig.damage(backend, 0, SIZES[size])
    assert await hits(pages, 0, 1) == [size == "longer" and rig.knows_sizes, True]
    await pages.remove([Page(0).digest])
    assert await put(pages, 0) == [True]
    assert await hits(pages, 0, 1) == [True, True]


async def test_store_04_flipped_and_cut_pages_are_all_counted_and_none_is_served(
    rig: Rig, backend: BreakerBackend, pages: ModelPages
) -> None:
    chance = random.Random(0)
    count = rig.damaged

    def flip(data: bytes) -> bytes:
        at = chance.randrange(len(data))
        return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]

    def cut(data: bytes) -> bytes:
        return data[: chance.randrange(len(data))]

    corrupt = 0
    for batch in batches(count):
        await put(pages, *batch)
        for n in batch:
            await rig.damage(backend, n, flip if n % 2 or rig.knows_sizes else cut)
        read = await get(pages, *batch)
        assert read.checksums == [None] * len(batch)
        corrupt += read.corrupt
    assert corrupt == backend.stats()["l3_corrupt"] == count
    await put(pages, *range(10))
    assert await hits(pages, *range(10)) == [True] * 10


async def test_store_04_a_full_store_makes_room_or_refuses_and_keeps_within_its_quota(rig: Rig) -> None:
    if not rig.quota_is_its_own:
        pytest.skip(f"{rig.kind} is bounded by its own server or not at all: see its own tests")
    backend = await rig.make(quota_pages=10)
    pages = await backend.of_model(MODEL, GEOMETRY)
    for n in range(30):
        assert await put(pages, n) == [True]
        assert backend.stats()["l3_bytes"] <= 10 * rig.page_bytes
    assert await hits(pages, *range(30)) == [n >= 20 for n in range(30)]
    assert backend.stats()["l3_attached"] == 1


async def test_store_02_writers_of_one_page_end_with_one_good_page(rig: Rig) -> None:
    backends = [await rig.make(identity=f"storage-{n}") for n in range(2)]
    both = [await backend.of_model(MODEL, GEOMETRY) for backend in backends]
    results = await asyncio.gather(*(put(pages, *range(20)) for pages in both for _ in range(3)))
    assert results == [[True] * 20] * 6
    for pages in both:
        assert await hits(pages, *range(20)) == [True] * 20


async def test_store_02_many_keys(rig: Rig, pages: ModelPages) -> None:
    buffer, checksums = memoryview(bytearray(Page(0).bytes)), Page(0).checksums
    digests = [n.to_bytes(32, "big") for n in range(rig.many)]
    for batch in batches(rig.many):
        keys = [digests[n] for n in batch]
        assert all(await pages.batch_set(keys, [buffer] * len(keys), [checksums] * len(keys), GO))
    found = [await pages.batch_exists([digests[n] for n in batch]) for batch in batches(rig.many)]
    assert sum(found) == rig.many
    sample = random.Random(1).sample(digests, MAX_BATCH)
    targets = [bytearray(GEOMETRY.page_bytes) for _ in sample]
    read = await pages.batch_get(sample, [memoryview(each) for each in targets], GO)
    assert all(each is not None for each in read.checksums)
    assert all(bytes(each) == Page(0).bytes for each in targets)


async def test_store_07_a_store_that_is_lost_costs_misses_and_is_used_again_when_it_is_back(
    rig: Rig, backend: BreakerBackend, pages: ModelPages
) -> None:
    await put(pages, 0, 1)
    async with rig.lost(backend):
        for _ in range(FAILURES_IN_A_ROW + 2):
            assert await hits(pages, 0, 1) == [False, False]
        stats = backend.stats()
        assert (stats["l3_attached"], stats["l3_detached"]) == (0, 1)
        assert (stats["l3_failures"], stats["l3_refused"]) == (FAILURES_IN_A_ROW, 2)
        assert await put(pages, 2) == [False]
        assert await exists(pages, 0) == 0
    await until_attached(backend)
    assert await put(pages, 2) == [True]
    assert await hits(pages, 2) == [True]
    assert await hits(pages, 0, 1) == [True, True] or not rig.survives


async def test_store_07_a_store_that_hangs_is_left_alone_after_a_few_deadlines(rig: Rig) -> None:
    rig.timeout_s = 0.15
    backend = await rig.make()
    pages = await backend.of_model(MODEL, GEOMETRY)
    await put(pages, 0)
    async with rig.stalled(backend):
        start_s = time.monotonic()
        batches = [asyncio.create_task(hits(pages, 0)) for _ in range(FAILURES_IN_A_ROW)]
        while backend.stats()["l3_attached"]:
            assert time.monotonic() - start_s < 20 * rig.timeout_s
            await asyncio.sleep(0.01)
        start_s = time.monotonic()
        assert await hits(pages, 0) == [False]
        assert time.monotonic() - start_s < rig.timeout_s
        assert isinstance(rig, HashFileRig) or await asyncio.gather(*batches) == [[False]] * len(batches)
    await asyncio.gather(*batches)
    await until_attached(backend)
    assert await put(pages, 0) == [True]
    assert await hits(pages, 0) == [True]


async def until_attached(backend: BreakerBackend) -> None:
    """What the service does every REFRESH_S, faster."""
    async with asyncio.timeout(20 * FIRST_BACK_OFF_S):
        while not backend.stats()["l3_attached"]:
            await backend.refresh()
            await asyncio.sleep(0.05)


def batches(count: int) -> list[range]:
    """Whole batches of the contract."""
    return [range(start, min(start + MAX_BATCH, count)) for start in range(0, count, MAX_BATCH)]
