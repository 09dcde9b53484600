"""Fixtures: a tiny model, a gateway with a scripted scheduler."""

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.unit.gateway.harness import Stack, Words, run_stack, write_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny-model")


@pytest.fixture
def words(model_folder: Path) -> Words:
    return Words(model_folder)


@pytest.fixture
def run_folder() -> Iterator[Path]:
    """Short: the path of a Unix socket has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="kvtide-") as folder:
        yield Path(folder)


@pytest.fixture
async def stack(run_folder: Path, model_folder: Path) -> AsyncIterator[Stack]:
    async with run_stack(run_folder, model_folder) as stack:
        yield stack


@pytest.fixture(autouse=True)
def quick_hello(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first hello is lost while the socket connects: don't wait half a second for the next."""
    monkeypatch.setattr("shared.link.HELLO_RETRY_S", 0.02)
