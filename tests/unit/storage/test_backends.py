"""What isn't the same for every backend: which one the configuration makes, `none`, and the files of a run.

The contract that all of them keep is in tests/backends.
"""

from pathlib import Path

import pytest

from services.storage.backend import Backend
from services.storage.backends import make_backend
from services.storage.none_backend import NoneBackend
from shared.config import load_config
from shared.errors import ConfigError, StorageError
from tests.unit.storage.pages import GEOMETRY, MODEL, Page, exists, get, hits, put


def make(kind: str, folder: Path, identity: str = "storage-0") -> Backend:
    config = load_config(
        overrides=[f"storage.backend={kind}", f"storage.folder={folder}", "storage.free_floor_bytes=0"]
    )
    return make_backend(config, identity)


@pytest.mark.parametrize(
    ("kind", "shared", "persistent", "capacity"),
    [
        ("none", False, False, 0),
        ("memory", False, False, 10 * 2**30),
        ("file", False, False, 10 * 2**30),
        ("hash_file", True, True, 10 * 2**30),
    ],
)
async def test_store_02_promises(kind: str, shared: bool, persistent: bool, capacity: int, tmp_path: Path) -> None:
    backend = make(kind, tmp_path)
    await backend.start()
    info = backend.info
    assert (info.kind, info.shared, info.persistent, info.capacity) == (kind, shared, persistent, capacity)
    await backend.close()


async def test_store_02_without_a_store_every_page_is_a_miss() -> None:
    pages = await NoneBackend().of_model(MODEL, GEOMETRY)
    assert await put(pages, 0, 1) == [False, False]
    assert await exists(pages, 0) == 0
    assert await hits(pages, 0) == [False]
    assert (await get(pages, 0)).corrupt == 0
    assert await pages.remove([Page(0).digest]) == 0


async def test_store_03_file_forgets_at_its_start_and_leaves_nothing(tmp_path: Path) -> None:
    first = make("file", tmp_path)
    await first.start()
    await put(await first.of_model(MODEL, GEOMETRY), 0)
    crashed = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    await first.close()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    for path, content in crashed.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    second = make("file", tmp_path)
    await second.start()
    assert await exists(await second.of_model(MODEL, GEOMETRY), 0) == 0
    assert second.info.backend_id != first.info.backend_id
    await second.close()


async def test_store_03_file_does_not_clear_a_folder_that_is_in_use(tmp_path: Path) -> None:
    first = make("file", tmp_path)
    await first.start()
    pages = await first.of_model(MODEL, GEOMETRY)
    await put(pages, 0)
    with pytest.raises(StorageError, match=r"another run\.name"):
        await make("file", tmp_path).start()
    other = make("file", tmp_path, "storage-1")
    await other.start()
    assert await exists(await other.of_model(MODEL, GEOMETRY), 0) == 0
    await other.close()
    assert await hits(pages, 0) == [True]
    await first.close()


async def test_store_03_a_runs_files_are_not_taken_for_a_models(tmp_path: Path) -> None:
    run, kept = make("file", tmp_path), make("hash_file", tmp_path)
    await run.start()
    await put(await run.of_model(MODEL, GEOMETRY), 0)
    await kept.start()
    assert kept.stats()["l3_files"] == 0
    await run.close()
    await kept.close()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["storage.backend=floppy"], "storage.backend"),
        (["storage.backend=dynamic"], r"needs storage\.dynamic_class"),
        (["storage.dynamic_class=a:B"], 'is for storage.backend "dynamic"'),
        (["storage.backend=dynamic", "storage.dynamic_class=a.B"], r"storage\.dynamic_class"),
        (["storage.backend=lmcache", "storage.address=host"], r"storage\.address"),
        (["storage.address=host:1"], 'for the backends "lmcache" and "mooncake"'),
        (["storage.options={a=1}"], 'for the backends "dynamic" and "mooncake"'),
        (["storage.timeout_s=0"], r"storage\.timeout_s"),
    ],
)
def test_store_03_a_configuration_that_cannot_work_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(overrides=overrides)
