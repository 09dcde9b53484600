"""One rig for each kind of backend that can run here."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from services.storage.backend import ModelPages
from services.storage.breaker import BreakerBackend
from tests.backends import lmcache_rig, mooncake_rig
from tests.backends.lmcache_rig import LmcacheRig, lmcache_server
from tests.backends.mooncake_rig import Cluster, MooncakeRig
from tests.backends.rigs import FileRig, GuideRig, HashFileRig, HiCacheRig, MemoryRig, PlainHashFileRig, Rig
from tests.backends.servers import Server
from tests.unit.storage.pages import GEOMETRY, MODEL

LOCAL = {rig.kind: rig for rig in (MemoryRig, FileRig, HashFileRig, GuideRig, HiCacheRig)}
# Why a kind can't run here, "" = it can. test_kinds.py says it once; the contract's tests run over the others.
KINDS = {**dict.fromkeys(LOCAL, ""), "lmcache": lmcache_rig.MISSING, "mooncake": mooncake_rig.missing()}


@pytest.fixture(scope="session")
def lmcache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A running LMCache server."""
    server = lmcache_server(tmp_path_factory.mktemp("lmcache"))
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def mooncake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A running Mooncake Store."""
    cluster = Cluster(tmp_path_factory.mktemp("mooncake"))
    cluster.start()
    yield cluster
    cluster.kill()


PLAIN = "hash_file in Python"


@pytest.fixture(params=[PLAIN, *(kind for kind, reason in KINDS.items() if not reason)])
async def rig(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    monkeypatch.syspath_prepend(tmp_path)  # where the guide's module is written
    rig: Rig
    if request.param == PLAIN:
        rig = PlainHashFileRig(tmp_path)
    elif request.param in LOCAL:
        rig = LOCAL[request.param](tmp_path)
    elif request.param == "mooncake":
        rig = MooncakeRig(tmp_path, request.getfixturevalue("mooncake"))
    else:
        rig = LmcacheRig(tmp_path, request.getfixturevalue("lmcache"))
    await rig.open()
    yield rig
    await rig.close()


@pytest.fixture
async def backend(rig: Rig) -> BreakerBackend:
    return await rig.make()


@pytest.fixture
async def pages(backend: BreakerBackend) -> ModelPages:
    return await backend.of_model(MODEL, GEOMETRY)
