"""Tiny random models of every supported architecture, as Hugging Face folders and as transformers' models."""

from pathlib import Path
from typing import Any, NamedTuple

import torch

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
    "tie_word_embeddings": False,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


class Variant(NamedTuple):
    """An architecture and what differs from TINY."""

    architecture: str
    changes: dict[str, Any]


VARIANTS = {
    "llama_tied": Variant(
        "LlamaForCausalLM",
        {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}},
    ),
    "llama_one_kv_head_per_head": Variant("LlamaForCausalLM", {"num_key_value_heads": 6, "head_dim": None}),
    "llama_one_kv_head": Variant("LlamaForCausalLM", {"num_key_value_heads": 1}),
    "llama3_rope": Variant("LlamaForCausalLM", {"rope_parameters": LLAMA3_ROPE}),
    "llama_biases": Variant("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "mistral": Variant("MistralForCausalLM", {"sliding_window": None}),
    "mistral_window_of_the_context": Variant("MistralForCausalLM", {"sliding_window": 256}),
    "qwen2": Variant("Qwen2ForCausalLM", {"head_dim": None}),
    "qwen2_tied": Variant("Qwen2ForCausalLM", {"tie_word_embeddings": True, "num_key_value_heads": 3}),
    "qwen3": Variant("Qwen3ForCausalLM", {"head_dim": 16}),
    "qwen3_tied": Variant("Qwen3ForCausalLM", {"tie_word_embeddings": True, "num_key_value_heads": 6}),
    "qwen3_bias": Variant("Qwen3ForCausalLM", {"attention_bias": True, "num_key_value_heads": 1}),
}
ONE_OF_EACH = ("llama_tied", "llama_biases", "mistral", "qwen2", "qwen3")


def make_folder(folder: Path, variant: Variant, **saving: Any) -> Any:
    """Write a tiny random model to `folder`, each bias and norm random too; return transformers' model."""
    import transformers

    torch.manual_seed(0)
    kind = getattr(transformers, variant.architecture)
    values = {key: value for key, value in {**TINY, **variant.changes}.items() if value is not None}
    if variant.changes.get("sliding_window", ...) is None:
        values["sliding_window"] = None
    model = kind(kind.config_class(**values)).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "norm" in name:
                tensor.uniform_(0.5, 1.5)
            elif name.endswith(".bias"):
                tensor.uniform_(-0.5, 0.5)
    model.save_pretrained(folder, **saving)
    return model
