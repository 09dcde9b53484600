"""Weights: every tensor as an own copy in the wanted dtype; the fingerprint follows content and names."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from services.gpu_worker.model.weights import Weights, weights_fingerprint
from shared.errors import ModelError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": torch.arange(6.0).view(2, 3)}, tmp_path / "model-1.safetensors")
    save_file({"b": torch.ones(1, 3, dtype=torch.bfloat16)}, tmp_path / "model-2.safetensors")
    return tmp_path


def test_reads_all_files_in_one_dtype(folder: Path) -> None:
    with Weights(folder, torch.float32) as weights:
        a, both = weights.get("a", 2, 3), weights.stacked(["b", "a"], [1, 2], 3)
    a.add_(1)
    assert both.tolist() == [[1, 1, 1], [0, 1, 2], [3, 4, 5]]
    assert both.dtype == torch.float32
    with Weights(folder, torch.bfloat16) as weights:
        assert weights.get("a", 2, 3).dtype == torch.bfloat16


def test_missing_or_misshapen_tensors_are_refused(folder: Path) -> None:
    with Weights(folder, torch.float32) as weights:
        with pytest.raises(ModelError, match="no tensor c"):
            weights.get("c", 1)
        with pytest.raises(ModelError, match=r"a is \[2, 3\], config.json asks for \[3, 2\]"):
            weights.get("a", 3, 2)


def test_damaged_files_are_refused(folder: Path) -> None:
    (folder / "model-2.safetensors").write_bytes(b"\x10" * 100)
    with pytest.raises(ModelError, match=r"model-2.safetensors is not a safetensors file"):
        Weights(folder, torch.float32)


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
