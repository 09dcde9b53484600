"""GGUF (Llama architecture) to a Hugging Face folder."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import save_file

from kvtide.default_model.tokenizer import build_tokenizer, tokenizer_config
from shared.errors import ModelError

DTYPE = torch.bfloat16

# One progress line per this many tensors (the file has 272).
PROGRESS_EVERY = 68

TOP_LEVEL = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(gguf: Path, folder: Path, progress: Callable[[str], None]) -> None:
    """Write the model in `gguf` into the empty `folder`: config, weights (bfloat16), tokenizer, generation defaults.

    Raises ModelError when the file's architecture, tensors or tokenizer are not those of a tied Llama.
    """
    progress(f"converting {gguf.name} into {folder.parent.parent} (once)")
    reader = GGUFReader(gguf)
    meta = {key: field.contents() for key, field in reader.fields.items()}
    config = model_config(meta)
    build_tokenizer(meta).save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", tokenizer_config(meta))
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", generation_config(meta))
    weights: dict[str, torch.Tensor] = {}
    for done, tensor in enumerate(reader.tensors):
        if done % PROGRESS_EVERY == 0:
            progress(f"dequantizing tensor {done + 1} of {len(reader.tensors)}")
        name = hf_name(tensor.name)
        values = dequantize(tensor.data, tensor.tensor_type)
        if ".attn_q." in tensor.name:
            values = unpermute(values, config["num_attention_heads"])
        elif ".attn_k." in tensor.name:
            values = unpermute(values, config["num_key_value_heads"])
        weights[name] = torch.from_numpy(np.array(values, dtype=np.float32)).to(DTYPE)
    progress(f"writing {sum(w.nbytes for w in weights.values()) / 1e6:.0f} MB of weights")
    try:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:
        raise ModelError(f"can't write the weights into {folder}: {error}: is the disk full?") from error


def model_config(meta: dict[str, Any]) -> dict[str, Any]:
    """Return the contents of `config.json` (a transformers LlamaConfig) from GGUF metadata.

    Raises ModelError when the architecture isn't Llama.
    """
    if meta.get("general.architecture") != "llama":
        raise ModelError(f"architecture {meta.get('general.architecture')!r} is not supported: only 'llama' is")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": meta["llama.attention.head_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": meta["llama.rope.dimension_count"],
        "max_position_embeddings": meta["llama.context_length"],
        "rms_norm_eps": _decimal(meta["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": _decimal(meta["llama.rope.freq_base"]),
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
        "torch_dtype": str(DTYPE).removeprefix("torch."),
    }


def generation_config(meta: dict[str, Any]) -> dict[str, Any]:
    """Return the contents of `generation_config.json`: an answer ends at <|im_end|> or at <|endoftext|>."""
    return {
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": [meta["tokenizer.ggml.eos_token_id"], meta["tokenizer.ggml.tokens"].index("<|endoftext|>")],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
    }


def hf_name(name: str) -> str:
    """Translate a GGUF tensor name: `blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`.

    Raises ModelError for a tensor that a tied Llama doesn't have.
    """
    if name in TOP_LEVEL:
        return TOP_LEVEL[name]
    match name.split("."):
        case ["blk", layer, part, "weight"] if part in IN_LAYER:
            return f"model.layers.{layer}.{IN_LAYER[part]}.weight"
    raise ModelError(f"tensor {name!r} has no place in a Llama with tied embeddings: use a Hugging Face folder")


def unpermute(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Undo GGUF's order of q and k rows, [rows, columns]: in each head from interleaved pairs to two halves.

    llama.cpp rotates neighbouring rows (0, 1), (2, 3), ...; Hugging Face rotates row i with row i + head_dim / 2.
    """
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _decimal(stored: float) -> float:
    """Return the decimal that was meant by a float32 in the file: 9.999999747378752e-06 is 1e-05."""
    return float(str(np.float32(stored)))


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
