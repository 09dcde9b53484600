"""Llama's forward pass over a paged KV pool."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from kernels.attention import store_kv
from services.gpu_worker.kv_pool import KVPool
from services.gpu_worker.model.batch import ForwardBatch, StepAttention
from services.gpu_worker.model.config import ModelConfig
from services.gpu_worker.model.linear import Linear
from services.gpu_worker.model.rope import angles, inverse_frequencies, rotate
from services.gpu_worker.model.weights import Weights


class Layer(NamedTuple):
    """One layer's weights; q, k, v and gate, up are each one product."""

    attention_norm: torch.Tensor  # [hidden]
    qkv: Linear
    out: Linear
    mlp_norm: torch.Tensor  # [hidden]
    gate_up: Linear
    down: Linear


class Llama:
    """LlamaForCausalLM for inference, on one rank. Its state never changes after it is made."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        """Takes copies of the tensors. Raises ModelError for one that is missing or has another shape."""
        self.config, self.dtype = config, weights.dtype
        self._q_width = config.heads * config.head_dim
        self._kv_width = config.kv_heads * config.head_dim
        self._embedding = weights.get("model.embed_tokens.weight", config.vocab, config.hidden)
        self._layers = [self._layer(weights, f"model.layers.{i}.") for i in range(config.layers)]
        self._norm = weights.get("model.norm.weight", config.hidden)
        tied = config.tied_embeddings
        self._head = Linear(self._embedding if tied else weights.get("lm_head.weight", config.vocab, config.hidden))
        self._frequencies = inverse_frequencies(config.rope, config.head_dim)

    @torch.inference_mode()
    def forward(
        self, batch: ForwardBatch, pool: KVPool, before_layer: Callable[[int], None] | None = None
    ) -> torch.Tensor:
        """Write the new tokens' K/V to their slots; float32 [n, vocab]: logits after each of `batch.sample_rows`.

        before_layer(i) is called before layer i's attention reads the pool: a caller that fills the prefix meanwhile
        waits there, and what it raises ends the pass.
        """
        return self.logits(self.hidden_states(batch, pool, before_layer)[batch.sample_rows])

    @torch.inference_mode()
    def hidden_states(
        self, batch: ForwardBatch, pool: KVPool, before_layer: Callable[[int], None] | None = None
    ) -> torch.Tensor:
        """`forward` up to the output matrix: [T, hidden] in the model's dtype."""
        x = F.embedding(batch.token_ids, self._embedding)
        cos, sin = angles(batch.positions, self._frequencies, self.dtype)
        attention = StepAttention(batch.segments, pool.page_size, self.config.head_dim**-0.5)
        for i, layer in enumerate(self._layers):
            q, k, v = self._qkv(layer, x, cos, sin)
            k_pool, v_pool = pool.layer_buffers(i)
            store_kv(k_pool, v_pool, batch.slots, k, v)
            if before_layer is not None:
                before_layer(i)
            x = x + layer.out(attention(q, k_pool, v_pool))
            gate, up = layer.gate_up(self._normed(x, layer.mlp_norm)).chunk(2, -1)
            x = x + layer.down(F.silu(gate).mul_(up))
        return self._normed(x, self._norm)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [n, vocab] of hidden states [n, hidden]."""
        return self._head(hidden).float()

    def _qkv(
        self, layer: Layer, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [T, H, D] and k [T, KV, D], rotated; v [T, KV, D]."""
        config = self.config
        qkv = layer.qkv(self._normed(x, layer.attention_norm)).unflatten(-1, (-1, config.head_dim))
        q, k = rotate(qkv[:, : config.heads + config.kv_heads], cos, sin).split([config.heads, config.kv_heads], 1)
        return q, k, qkv[:, config.heads + config.kv_heads :]

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (self.config.hidden,), weight, self.config.rms_eps)

    def _layer(self, weights: Weights, prefix: str) -> Layer:
        hidden, inner = self.config.hidden, self.config.intermediate
        qkv = [f"{prefix}self_attn.{name}_proj.weight" for name in "qkv"]
        gate_up = [f"{prefix}mlp.{name}_proj.weight" for name in ("gate", "up")]
        return Layer(
            attention_norm=weights.get(f"{prefix}input_layernorm.weight", hidden),
            qkv=Linear(weights.stacked(qkv, [self._q_width, self._kv_width, self._kv_width], hidden)),
            out=Linear(weights.get(f"{prefix}self_attn.o_proj.weight", hidden, self._q_width)),
            mlp_norm=weights.get(f"{prefix}post_attention_layernorm.weight", hidden),
            gate_up=Linear(weights.stacked(gate_up, [inner, inner], hidden)),
            down=Linear(weights.get(f"{prefix}mlp.down_proj.weight", hidden, inner)),
        )
