"""What only Mooncake has: a pool of lent memory that fills, and a package that may be missing."""

import sys
from pathlib import Path

import pytest

from services.storage.backends import make_backend
from shared.config import load_config
from shared.errors import StorageError
from tests.backends.mooncake_rig import Cluster, MooncakeRig, missing
from tests.unit.storage.pages import GEOMETRY, MODEL, hits, put

NODE_BYTES = 16 * 2**20  # Mooncake's smallest segment
TOO_MANY = 6000  # pages


@pytest.mark.skipif(bool(missing()), reason=missing())
async def test_store_03_a_full_mooncake_drops_or_evicts_pages_and_nothing_else(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, NODE_BYTES)
    cluster.start()
    rig = MooncakeRig(tmp_path, cluster)
    try:
        backend = await rig.make()
        pages = await backend.of_model(MODEL, GEOMETRY)
        stored = []
        for start in range(0, TOO_MANY, 100):
            stored += await put(pages, *range(start, start + 100))
        kept = [hit for start in range(0, TOO_MANY, 100) for hit in await hits(pages, *range(start, start + 100))]
        assert 0 < sum(kept) < TOO_MANY
        assert backend.stats()["l3_dropped"] == stored.count(False)
        assert (backend.stats()["l3_failures"], backend.stats()["l3_corrupt"]) == (0, 0)
    finally:
        await rig.close()
        cluster.kill()


def test_store_03_without_mooncake_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(StorageError, match=r"pip install --no-deps -r requirements-mooncake\.txt"):
        make_backend(load_config(overrides=["storage.backend=mooncake"]), "storage-0")


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_options_that_mooncake_does_not_know_are_refused() -> None:
    with pytest.raises(StorageError, match=r"storage\.options"):
        make_backend(load_config(overrides=["storage.backend=mooncake", "storage.options={colour=1}"]), "storage-0")
