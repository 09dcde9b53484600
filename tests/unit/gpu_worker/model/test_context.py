"""The context that a worker promises: the model's own or the configured one, and never beyond a sliding window."""

from pathlib import Path

import pytest

from services.gpu_worker.engine import build_engine
from shared.config import load_config
from shared.errors import ConfigError, ModelError
from tests.unit.gpu_worker.model.families import Variant, make_folder


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mistral with a context of 256 tokens and a window of 64."""
    folder = tmp_path_factory.mktemp("windowed")
    make_folder(folder, Variant("MistralForCausalLM", {"sliding_window": 64}))
    return folder


def context(folder: Path, wanted: int) -> int:
    engine = build_engine(load_config(None, [f"model.path={folder}", f"model.max_context={wanted}"]))
    engine.close()
    return engine.max_context


@pytest.mark.parametrize(("wanted", "found"), [(0, 256), (100, 100), (256, 256)])
def test_context(tiny_folder: Path, wanted: int, found: int) -> None:
    assert context(tiny_folder, wanted) == found


def test_a_context_above_the_models_is_refused(tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match="max_context 257 is above the model's 256"):
        context(tiny_folder, 257)


@pytest.mark.parametrize("wanted", [0, 65])
def test_a_context_above_the_window_is_refused(windowed: Path, wanted: int) -> None:
    with pytest.raises(
        ModelError, match=r"sliding_window 64 is below the context .* set model.max_context to 64 or less"
    ):
        context(windowed, wanted)


@pytest.mark.parametrize("wanted", [64, 10])
def test_a_context_inside_the_window_is_served(windowed: Path, wanted: int) -> None:
    assert context(windowed, wanted) == wanted
