"""A tiny random Llama, as a folder and as our model."""

from pathlib import Path

import pytest

from services.gpu_worker.model.llama import Llama
from services.gpu_worker.model.load import load_model
from tests.unit.gpu_worker.model.families import VARIANTS, make_folder


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to read, not to change."""
    folder = tmp_path_factory.mktemp("tiny")
    make_folder(folder, VARIANTS["llama_tied"])
    return folder


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> Llama:
    return load_model(tiny_folder, "float32")
