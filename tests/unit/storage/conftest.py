"""Stores on real folders, and files that can't be removed."""

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from kernels import build, native
from services.storage.hash_file import HashFileBackend
from services.storage.page_batch import Policy
from tests.unit.storage.pages import FILE_BYTES

MakeStore = Callable[..., Coroutine[Any, Any, HashFileBackend]]


@pytest.fixture(params=["c", "plain"])
def version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How page files are moved: by the C extension or without it."""
    if request.param == "plain":
        monkeypatch.setattr(native, "load", lambda: (None, "turned off by a test"))
    elif native.load()[0] is None:
        assert build.find_compiler() is None, "a compiler is here: run `python -m kernels.build` before the tests"
        pytest.skip("no C compiler here")
    return str(request.param)


@pytest.fixture
async def make_store(tmp_path: Path, version: str) -> AsyncIterator[MakeStore]:
    """Starts stores on one folder, and closes them at the end."""
    stores = []

    async def make(quota_pages: int = 1000, *, folder: Path | None = None, verify: bool = True) -> HashFileBackend:
        quota = quota_pages * FILE_BYTES
        store = HashFileBackend(
            folder or tmp_path / "l3", quota, free_floor_bytes=0, io_threads=2, policy=Policy(verify)
        )
        stores.append(store)
        await store.start()
        return store

    yield make
    for store in stores:
        await store.close()


@pytest.fixture
def immovable(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[Path]]:
    """Paths put into this set can't be removed or renamed."""
    paths: set[Path] = set()
    for name in ("unlink", "rename"):
        original = getattr(Path, name)

        def guarded(path: Path, *args: Any, original: Any = original, **kwargs: Any) -> Any:
            if path in paths:
                raise PermissionError(1, "Operation not permitted", str(path))
            return original(path, *args, **kwargs)

        monkeypatch.setattr(Path, name, guarded)
    return paths
