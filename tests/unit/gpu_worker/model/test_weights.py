"""Weights: every tensor as an own copy in the wanted dtype; the fingerprint follows content and names."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from services.gpu_worker.model.weights import Weights, weight_files, weights_fingerprint
from shared.errors import ModelError

NAMES = ("model-1.safetensors", "model-2.safetensors")


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": torch.arange(6.0).view(2, 3)}, tmp_path / NAMES[0])
    save_file({"b": torch.ones(1, 3, dtype=torch.bfloat16)}, tmp_path / NAMES[1])
    write_index(tmp_path, {"a": NAMES[0], "b": NAMES[1]})
    return tmp_path


def test_reads_all_files_in_one_dtype(folder: Path) -> None:
    with Weights(folder, torch.float32) as weights:
        a, both = weights.get("a", 2, 3), weights.stacked(["b", "a"], [1, 2], 3)
    a.add_(1)
    assert both.tolist() == [[1, 1, 1], [0, 1, 2], [3, 4, 5]]
    assert both.dtype == torch.float32
    with Weights(folder, torch.bfloat16) as weights:
        assert weights.get("a", 2, 3).dtype == torch.bfloat16


def test_files_are_those_that_transformers_reads(folder: Path) -> None:
    save_file({"a": torch.zeros(1)}, folder / "consolidated.safetensors")
    assert [path.name for path in weight_files(folder)] == list(NAMES)
    save_file({"a": torch.zeros(1)}, folder / "model.safetensors")
    assert [path.name for path in weight_files(folder)] == ["model.safetensors"]


def test_missing_files_are_named(folder: Path) -> None:
    (folder / NAMES[1]).unlink()
    with pytest.raises(ModelError, match=r"model-2.safetensors is missing, model.safetensors.index.json names it"):
        Weights(folder, torch.float32)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelError, match=r"holds neither model.safetensors nor model.safetensors.index.json"):
        Weights(folder, torch.float32)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": 1}', '{"weight_map": {"a": 1}}'])
def test_a_damaged_index_is_named(folder: Path, content: str) -> None:
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelError, match=r"index.json is not an index of weights"):
        weight_files(folder)


def test_missing_or_misshapen_tensors_are_refused(folder: Path) -> None:
    with Weights(folder, torch.float32) as weights:
        with pytest.raises(ModelError, match=r"no tensor c, config.json asks for it"):
            weights.get("c", 1)
        with pytest.raises(ModelError, match=r"model-1.safetensors: a is \[2, 3\], config.json asks for \[3, 2\]"):
            weights.get("a", 3, 2)


@pytest.mark.parametrize("kept", [0, 4, 40, -1])
def test_a_file_cut_short_is_named(folder: Path, kept: int) -> None:
    file = folder / NAMES[1]
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ModelError, match=r"model-2.safetensors is damaged, cut short or not a safetensors file"):
        Weights(folder, torch.float32)


@pytest.mark.parametrize("content", [b"\x10" * 100, b"\x08" + b"\0" * 7 + b'{"a": 1}'])
def test_damaged_files_are_refused(folder: Path, content: bytes) -> None:
    (folder / NAMES[1]).write_bytes(content)
    with pytest.raises(ModelError, match=r"model-2.safetensors is damaged"):
        Weights(folder, torch.float32)


def test_a_pointer_in_place_of_the_weights_is_named(folder: Path) -> None:
    (folder / NAMES[1]).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    with pytest.raises(ModelError, match=r"model-2.safetensors is a Git LFS pointer.*git lfs pull"):
        Weights(folder, torch.float32)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e5])
def test_values_that_are_no_numbers_are_refused(folder: Path, value: float) -> None:
    save_file({"b": torch.tensor([0.0, value, 1.0])}, folder / NAMES[1])
    with Weights(folder, torch.float16) as weights, pytest.raises(ModelError, match="b has a value that is no number"):
        weights.get("b", 3)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float64])
def test_other_dtypes_are_refused(folder: Path, dtype: torch.dtype) -> None:
    save_file({"b": torch.ones(3).to(dtype)}, folder / NAMES[1])
    with Weights(folder, torch.float32) as weights, pytest.raises(ModelError, match=f"b is {dtype}, which is not one"):
        weights.get("b", 3)


def test_fingerprint_follows_content_and_names(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    seen = {weights_fingerprint(folder)}
    copy = tmp_path_factory.mktemp("copy") / "elsewhere"
    shutil.copytree(folder, copy)
    assert weights_fingerprint(copy) in seen
    (copy / "tokenizer.json").write_text("not a weight")
    assert weights_fingerprint(copy) in seen
    (copy / "config.json").write_text("{ }")
    seen.add(weights_fingerprint(copy))
    (copy / "model-2.safetensors").rename(copy / "model-3.safetensors")
    write_index(copy, {"a": NAMES[0], "b": "model-3.safetensors"})
    seen.add(weights_fingerprint(copy))
    data = bytearray((copy / "model-1.safetensors").read_bytes())
    data[-1] ^= 1
    (copy / "model-1.safetensors").write_bytes(data)
    seen.add(weights_fingerprint(copy))
    assert len(seen) == 4
    assert {len(fingerprint) for fingerprint in seen} == {32}


def test_fingerprint_needs_all_files(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match="can't be read"):
        weights_fingerprint(folder)
