"""The forward pass of the Llama family (Llama, Mistral, Qwen2, Qwen3) over a paged KV pool."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from kernels.attention import store_kv
from kernels.rowwise import rms_norm, rotate, silu_and_mul
from services.gpu_worker.kv_pool import KVPool
from services.gpu_worker.model.batch import ForwardBatch, StepAttention
from services.gpu_worker.model.config import ModelConfig
from services.gpu_worker.model.linear import Linear
from services.gpu_worker.model.rope import angles, inverse_frequencies
from services.gpu_worker.model.weights import Weights

HEAD = "lm_head.weight"


class Layer(NamedTuple):
    """One layer's weights; q, k, v and gate, up are each one product."""

    attention_norm: torch.Tensor  # [hidden]
    qkv: Linear
    q_norm: torch.Tensor | None  # [head_dim]; None: q and k are not normed
    k_norm: torch.Tensor | None  # [head_dim]
    out: Linear
    mlp_norm: torch.Tensor  # [hidden]
    gate_up: Linear
    down: Linear


class Llama:
    """A model of the family for inference, on one rank. Its state never changes after it is made."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        """Takes copies of the tensors. Raises ModelError for one that is missing or has another shape."""
        self.config, self.dtype = config, weights.dtype
        self._q_width = config.heads * config.head_dim
        self._kv_width = config.kv_heads * config.head_dim
        self._embedding = weights.get("model.embed_tokens.weight", config.vocab, config.hidden)
        self._layers = [self._layer(weights, f"model.layers.{i}.") for i in range(config.layers)]
        self._norm = weights.get("model.norm.weight", config.hidden)
        # As in transformers 5, an output matrix in the files counts more than what config.json says of it.
        tied = config.tied_embeddings and HEAD not in weights
        self._head = Linear(self._embedding if tied else weights.get(HEAD, config.vocab, config.hidden))
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
            x = x + layer.down(silu_and_mul(layer.gate_up(self._normed(x, layer.mlp_norm))))
        return self._normed(x, self._norm)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [n, vocab] of hidden states [n, hidden]."""
        return self._head(hidden).float()

    def _qkv(
        self, layer: Layer, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [T, H, D] and k [T, KV, D], rotated; v [T, KV, D]."""
        heads, kv_heads = self.config.heads, self.config.kv_heads
        qkv = layer.qkv(self._normed(x, layer.attention_norm)).unflatten(-1, (-1, self.config.head_dim))
        qk, v = qkv.split([heads + kv_heads, kv_heads], 1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = qk.split([heads, kv_heads], 1)
            qk = torch.cat([self._normed(q, layer.q_norm), self._normed(k, layer.k_norm)], 1)
        q, k = rotate(qk, cos, sin).split([heads, kv_heads], 1)
        return q, k, v

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight, self.config.rms_eps)

    def _layer(self, weights: Weights, prefix: str) -> Layer:
        config, hidden, inner = self.config, self.config.hidden, self.config.intermediate
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        qkv = {f"{attention}q_proj": self._q_width} | {f"{attention}{name}_proj": self._kv_width for name in "kv"}
        gate_up = {f"{mlp}gate_proj": inner, f"{mlp}up_proj": inner}
        return Layer(
            attention_norm=weights.get(f"{prefix}input_layernorm.weight", hidden),
            qkv=_linear(weights, qkv, hidden, config.qkv_bias),
            q_norm=weights.get(f"{attention}q_norm.weight", config.head_dim) if config.qk_norm else None,
            k_norm=weights.get(f"{attention}k_norm.weight", config.head_dim) if config.qk_norm else None,
            out=_linear(weights, {f"{attention}o_proj": hidden}, self._q_width, config.out_bias),
            mlp_norm=weights.get(f"{prefix}post_attention_layernorm.weight", hidden),
            gate_up=_linear(weights, gate_up, hidden, config.mlp_bias),
            down=_linear(weights, {f"{mlp}down_proj": hidden}, inner, config.mlp_bias),
        )


def _linear(weights: Weights, rows: dict[str, int], columns: int, bias: bool) -> Linear:
    """Projections of one input, name -> rows, as one product."""
    names, counts = list(rows), list(rows.values())
    matrix = weights.stacked([f"{name}.weight" for name in names], counts, columns)
    return Linear(matrix, weights.stacked([f"{name}.bias" for name in names], counts) if bias else None)
