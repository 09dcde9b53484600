"""Rotary position embedding (Su et al., 2021), in the half-split form of the Hugging Face checkpoints."""

import math

import torch

from services.gpu_worker.model.config import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """float32 [head_dim / 2]: radians per position."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.type == "default":
        return plain
    turns = rope.original_max_positions * plain / (2 * math.pi)  # in the length that the model was first trained on
    keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return (1 - keep) * plain / rope.factor + keep * plain


def angles(positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and signed sin, each [T, 1, head_dim], of positions int64 [T]: what `kernels.rowwise.rotate` takes."""
    half = torch.outer(positions.float(), frequencies)
    cos, sin = half.cos(), half.sin()
    return torch.cat([cos, cos], -1)[:, None].to(dtype), torch.cat([-sin, sin], -1)[:, None].to(dtype)
