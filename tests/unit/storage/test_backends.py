"""The contract of STORE-02, for every backend."""

import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.storage.backend import MAX_BATCH, Backend, ModelPages
from services.storage.hash_file import HashFileBackend
from services.storage.none_backend import NoneBackend
from services.storage.service import make_backend
from shared.config import load_config
from tests.unit.storage.pages import GEOMETRY, MODEL, Page, exists, get, hits, put


@pytest.fixture(params=["hash_file", "none"])
async def backend(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Backend]:
    backend = make_backend(
        load_config(overrides=[f"storage.backend={request.param}", f"storage.folder={tmp_path / 'l3'}"])
    )
    await backend.start()
    yield backend
    await backend.close()


@pytest.fixture
async def pages(backend: Backend) -> ModelPages:
    return await backend.of_model(MODEL, GEOMETRY)


async def test_store_02_a_page_that_was_stored_can_be_read_and_no_other(backend: Backend, pages: ModelPages) -> None:
    stored = await put(pages, 0, 1, 2)
    assert stored == [backend.info.capacity > 0] * 3
    assert await hits(pages, 0, 7, 2) == [stored[0], False, stored[2]]
    assert (await get(pages, 0, 7, 2)).corrupt == 0


async def test_store_02_exists_counts_leading_hits(pages: ModelPages) -> None:
    kept = all(await put(pages, 0, 1, 3))
    assert await exists(pages, 0, 1, 2, 3) == (2 if kept else 0)
    assert await exists(pages, 2, 0) == 0
    assert await exists(pages) == 0


async def test_store_02_removed_pages_are_misses(pages: ModelPages) -> None:
    kept = all(await put(pages, 0, 1))
    assert await pages.remove([Page(0).digest, Page(9).digest]) == (1 if kept else 0)
    assert await hits(pages, 0, 1) == [False, kept]


async def test_store_02_clear_forgets_everything(backend: Backend, pages: ModelPages) -> None:
    await put(pages, 0, 1)
    await backend.clear()
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


async def test_store_02_promises(backend: Backend) -> None:
    info = backend.info
    if isinstance(backend, NoneBackend):
        assert (info.kind, info.shared, info.persistent, info.capacity) == ("none", False, False, 0)
    if isinstance(backend, HashFileBackend):
        assert (info.kind, info.shared, info.persistent) == ("hash_file", True, True)
        assert info.capacity == 10 * 2**30
