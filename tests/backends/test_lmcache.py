"""What only LMCache has: a memory tier that fills, files behind it, and a server that can be missing."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tests.backends.lmcache_rig import MISSING, LmcacheRig, lmcache_server
from tests.backends.servers import Server, free_port
from tests.unit.storage.pages import GEOMETRY, MODEL, exists, hits, put

BACK_S = 60.0  # until the store is tried again: its back-off doubles
DRAIN_S = 2.0  # LMCache writes behind; a hundred small pages take a tenth of it

MakeRig = Callable[[Server], LmcacheRig]


@pytest.fixture
async def make_rig(tmp_path: Path) -> AsyncIterator[MakeRig]:
    """Rigs that are closed at the end."""
    rigs = []

    def make(server: Server) -> LmcacheRig:
        rigs.append(LmcacheRig(tmp_path, server))
        return rigs[-1]

    yield make
    for rig in rigs:
        await rig.close()


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
async def test_store_03_lmcache_pages_on_its_disk_survive_kill_9(lmcache: Server, make_rig: MakeRig) -> None:
    rig = make_rig(lmcache)
    await rig.open()
    backend = await rig.make()
    pages = await backend.of_model(MODEL, GEOMETRY)
    assert await put(pages, *range(100)) == [True] * 100
    await asyncio.sleep(DRAIN_S)
    lmcache.kill()
    lmcache.start()
    async with asyncio.timeout(BACK_S):
        while not await exists(pages, 0):
            await backend.refresh()
            await asyncio.sleep(0.1)
    assert await exists(pages, *range(100)) == 100
    assert await hits(pages, *range(100)) == [True] * 100


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
async def test_store_03_lmcache_with_full_memory_drops_pages_and_nothing_else(
    tmp_path: Path, make_rig: MakeRig
) -> None:
    server = lmcache_server(tmp_path, memory_gb=0.008, files=False)
    server.start()
    try:
        backend = await make_rig(server).make()
        pages = await backend.of_model(MODEL, GEOMETRY)
        stored = []
        for start in range(0, 4000, 100):
            stored += await put(pages, *range(start, start + 100))
        assert backend.stats()["l3_dropped"] == stored.count(False)
        kept = [hit for start in range(0, 4000, 100) for hit in await hits(pages, *range(start, start + 100))]
        assert 0 < sum(kept) < 2000  # 8 MB are 1,000 pages or fewer
        assert (backend.stats()["l3_failures"], backend.stats()["l3_corrupt"]) == (0, 0)
    finally:
        server.kill()


async def test_store_07_an_lmcache_server_that_isnt_there_at_the_start_costs_misses(
    tmp_path: Path, make_rig: MakeRig
) -> None:
    rig = make_rig(Server([], free_port(), tmp_path, {}))
    rig.timeout_s = 0.1
    backend = await rig.make()
    pages = await backend.of_model(MODEL, GEOMETRY)
    assert await put(pages, 0) == [False]
    assert (backend.stats()["l3_attached"], backend.stats()["l3_refused"]) == (0, 1)
