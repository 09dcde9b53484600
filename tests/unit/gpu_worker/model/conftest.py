"""A tiny random Llama, as a Hugging Face folder, as transformers' model and as ours."""

from pathlib import Path
from typing import Any

import pytest
import torch

from services.gpu_worker.model.llama import Llama
from services.gpu_worker.model.load import load_model

TINY = {
    "vocab_size": 97,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "eos_token_id": [1, 2],
    "initializer_range": 0.3,  # large, so that the logits tell tokens apart
}
VARIANTS: dict[str, dict[str, Any]] = {
    "tied": {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}},
    "untied_one_kv_head_per_head": {"tie_word_embeddings": False, "num_key_value_heads": 6},
    "llama3_rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
}


def make_folder(folder: Path, **changes: Any) -> Any:
    """Write a tiny random model to `folder`; return transformers' model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**TINY, **changes})).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "norm" in name:
                tensor.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to read, not to change."""
    folder = tmp_path_factory.mktemp("tiny")
    make_folder(folder, **VARIANTS["tied"])
    return folder


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> Llama:
    return load_model(tiny_folder, "float32")
