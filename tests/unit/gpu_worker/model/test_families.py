"""Every supported architecture gives transformers' logits: cold, in chunks on scattered pages, token by token."""

import logging
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import kernels.linear
from services.gpu_worker.model import linear
from services.gpu_worker.model.load import load_model
from services.gpu_worker.model.weights import DTYPES
from tests.unit.gpu_worker.model.families import ONE_OF_EACH, VARIANTS, make_folder
from tests.unit.gpu_worker.model.paged import CLOSE, Engine, random_ids

TOKENS = 150
CUTS = {
    "cold": [TOKENS],
    "chunks": [7, 40, 64, 101, TOKENS],
    "decode": [100, *range(101, TOKENS + 1)],
}
# Root mean square of the difference from float32, in standard deviations of the logits: 0.023 to 0.034 and 0.002 to
# 0.004 were measured. bfloat16 has 8 bits of mantissa, float16 has 11.
NOISE = {"bfloat16": 0.06, "float16": 0.008}


class Reference(NamedTuple):
    folder: Path
    model: Any  # transformers'
    ids: list[int]
    logits: torch.Tensor  # [TOKENS, vocab]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    made, ids = {}, random_ids(TOKENS)
    for name, variant in VARIANTS.items():
        folder = tmp_path_factory.mktemp(name)
        model = make_folder(folder, variant)
        with torch.inference_mode():
            made[name] = Reference(folder, model, ids, model(torch.tensor([ids])).logits[0])
        assert made[name].logits.std() > 1, name
    return made


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(references: dict[str, Reference], variant: str, cuts: str) -> None:
    reference = references[variant]
    found = Engine(load_model(reference.folder, "float32")).in_steps(reference.ids, CUTS[cuts])
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, reference.logits, **CLOSE)


@pytest.mark.parametrize("variant", ONE_OF_EACH)
def test_packed_products_keep_biases(
    references: dict[str, Reference], variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """oneDNN's operators, which take float32 as well."""
    monkeypatch.setattr(linear, "_is_half_on_cpu", lambda weight: True)
    monkeypatch.setattr(kernels.linear, "is_needed", lambda: False)
    monkeypatch.setattr(linear, "can_pack", lambda: True)
    reference = references[variant]
    found = Engine(load_model(reference.folder, "float32")).cold(reference.ids)
    torch.testing.assert_close(found, reference.logits, **CLOSE)


@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize("dtype", NOISE)
@pytest.mark.parametrize("variant", ONE_OF_EACH)
def test_half_precision_is_as_near_as_transformers(
    references: dict[str, Reference], variant: str, dtype: str, by_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels.linear, "is_needed", lambda: by_kernel)  # with and without bfloat16's instructions
    reference = references[variant]
    theirs = type(reference.model).from_pretrained(reference.folder, dtype=DTYPES[dtype]).eval()
    with torch.inference_mode():
        expected = theirs(torch.tensor([reference.ids])).logits[0].float()
    found = Engine(load_model(reference.folder, dtype)).cold(reference.ids)
    assert found.dtype == torch.float32
    noise, their_noise = (rms(logits - reference.logits) for logits in (found, expected))
    assert noise < NOISE[dtype] * reference.logits.std()
    assert noise < 1.5 * their_noise


def rms(values: torch.Tensor) -> torch.Tensor:
    return values.square().mean().sqrt()


def test_sharded_weights_give_the_same_logits(references: dict[str, Reference], tmp_path: Path) -> None:
    reference = references["qwen3"]
    reference.model.save_pretrained(tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    found = Engine(load_model(tmp_path, "float32")).cold(reference.ids)
    torch.testing.assert_close(found, reference.logits, **CLOSE)


def test_an_output_matrix_in_the_files_counts_more_than_the_configuration(tmp_path: Path) -> None:
    """As in transformers 5."""
    from transformers import LlamaForCausalLM

    make_folder(tmp_path, VARIANTS["llama3_rope"])
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"tie_word_embeddings": false', '"tie_word_embeddings": true'))
    ids = random_ids(20)
    with torch.inference_mode():
        expected = LlamaForCausalLM.from_pretrained(tmp_path).eval()(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(Engine(load_model(tmp_path, "float32")).cold(ids), expected, **CLOSE)


def test_tensors_that_the_model_does_not_use_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_folder(tmp_path, VARIANTS["llama_biases"])
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"mlp_bias": true', '"mlp_bias": false'))
    with caplog.at_level(logging.WARNING, "kvtide.model"):
        load_model(tmp_path, "float32")
    assert "tensors_not_used count=9 first=model.layers.0.mlp.down_proj.bias" in caplog.text
