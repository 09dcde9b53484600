"""A Llama without a cache, written from the paper's formulas: what the worker's logits are compared with."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file


def dense_logprobs(folder: Path, tokens: list[int]) -> torch.Tensor:
    """float64 [tokens, vocab]: log-probabilities after each token."""
    shape = json.loads((folder / "config.json").read_text())
    weights = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
    heads, kv_heads, dim = shape["num_attention_heads"], shape["num_key_value_heads"], shape["head_dim"]
    n = len(tokens)

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + shape["rms_norm_eps"]) * weights[name]

    frequencies = shape["rope_theta"] ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = torch.arange(n, dtype=torch.float64)[:, None] * frequencies
    cos, sin = torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()

    def rotate(x: torch.Tensor) -> torch.Tensor:  # [heads, n, dim]
        low, high = x.chunk(2, -1)
        return x * cos + torch.cat([-high, low], -1) * sin

    x = weights["model.embed_tokens.weight"][torch.tensor(tokens)]
    future = torch.ones(n, n, dtype=torch.bool).triu(1)
    for layer in range(shape["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        h = norm(x, f"{prefix}input_layernorm.weight")
        q, k, v = (
            (h @ weights[f"{prefix}self_attn.{part}_proj.weight"].T).view(n, count, dim).transpose(0, 1)
            for part, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        q, k = rotate(q), rotate(k)
        k, v = (each.repeat_interleave(heads // kv_heads, 0) for each in (k, v))
        scores = (q @ k.transpose(1, 2) / dim**0.5).masked_fill(future, -torch.inf)
        mixed = (scores.softmax(-1) @ v).transpose(0, 1).reshape(n, heads * dim)
        x = x + mixed @ weights[f"{prefix}self_attn.o_proj.weight"].T
        h = norm(x, f"{prefix}post_attention_layernorm.weight")
        gate, up = (h @ weights[f"{prefix}mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        x = x + (torch.nn.functional.silu(gate) * up) @ weights[f"{prefix}mlp.down_proj.weight"].T
    return (norm(x, "model.norm.weight") @ weights["lm_head.weight"].T).log_softmax(-1)
