"""Reads a Hugging Face folder's config.json. No torch."""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import msgspec

from shared.errors import ModelError
from shared.geometry import HostLayout, PageGeometry, Part

ROPE_TYPES = ("default", "llama3")
LLAMA3_KEYS = {  # in config.json: in Rope
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_max_positions",
}
DEFAULT_WINDOW = 4096  # tokens: transformers' sliding_window where config.json has no such key


class Family(NamedTuple):
    """How an architecture differs from its relatives, as transformers builds them."""

    attention_bias: bool = False  # does its config.json say whether q, k, v and o have a bias?
    mlp_bias: bool = False  # does its config.json say whether the MLP has one?
    qkv_bias: bool = False  # have q, k and v always a bias?
    qk_norm: bool = False  # are q and k normed, head by head, before they are rotated?
    head_dim: bool = False  # must config.json give it, because hidden / heads would be wrong?
    window_switch: bool = True  # does sliding_window only count with use_sliding_window?


FAMILIES = {
    "LlamaForCausalLM": Family(attention_bias=True, mlp_bias=True),
    "MistralForCausalLM": Family(window_switch=False),
    "Qwen2ForCausalLM": Family(qkv_bias=True),
    "Qwen3ForCausalLM": Family(attention_bias=True, qk_norm=True, head_dim=True),
}


class Rope(NamedTuple):
    """Rotary embedding. The last four only count for `llama3`, which stretches the low frequencies."""

    type: str  # of ROPE_TYPES
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: float = 8192.0  # tokens


class ModelConfig(msgspec.Struct, frozen=True):
    """What the forward pass needs to know of a model."""

    architecture: str  # a key of FAMILIES
    layers: int
    heads: int
    kv_heads: int
    head_dim: int  # elements
    hidden: int  # elements
    intermediate: int  # elements
    rms_eps: float
    rope: Rope
    vocab: int  # token ids
    max_positions: int  # tokens
    tied_embeddings: bool  # is the output matrix the embedding matrix?
    eos_ids: tuple[int, ...]
    qkv_bias: bool = False
    out_bias: bool = False  # of the attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None  # tokens that some layer sees; None = all

    def page_geometry(self, page_size: int, dtype: str, layout: HostLayout = "page_first_direct") -> PageGeometry:
        """The geometry of this model's pages on one rank. Raises GeometryError."""
        parts = tuple(Part(name, self.kv_heads, self.head_dim, dtype) for name in ("k", "v"))
        return PageGeometry(page_size=page_size, layers=self.layers, parts=parts, layout=layout)


def read_config(folder: Path) -> ModelConfig:
    """Read `folder/config.json`. Raises ModelError, by name, for what is missing, damaged or unsupported."""
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path} can't be read ({error.strerror}); give a Hugging Face model folder") from error
    except ValueError as error:
        raise ModelError(f"{path} is not JSON ({error}); download the model again") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path} holds a {type(raw).__name__}, not an object; download the model again")
    return _Reader(path, raw).model()


class _Reader:
    def __init__(self, path: Path, raw: dict[str, Any]) -> None:
        self._path, self._raw = path, raw

    def model(self) -> ModelConfig:
        architecture = self._architecture()
        family = FAMILIES[architecture]
        self._refuse_unsupported()
        heads, hidden = self._int("num_attention_heads"), self._int("hidden_size")
        attention_bias = family.attention_bias and self._flag("attention_bias")
        config = ModelConfig(
            architecture=architecture,
            layers=self._int("num_hidden_layers"),
            heads=heads,
            kv_heads=self._int("num_key_value_heads", heads),
            head_dim=self._int("head_dim", None if family.head_dim else hidden // heads),
            hidden=hidden,
            intermediate=self._int("intermediate_size"),
            rms_eps=self._float(self._raw, "rms_norm_eps"),
            rope=self._rope(),
            vocab=self._int("vocab_size"),
            max_positions=self._int("max_position_embeddings"),
            tied_embeddings=self._flag("tie_word_embeddings"),
            eos_ids=self._eos_ids(),
            qkv_bias=family.qkv_bias or attention_bias,
            out_bias=attention_bias,
            mlp_bias=family.mlp_bias and self._flag("mlp_bias"),
            qk_norm=family.qk_norm,
            sliding_window=self._window(family),
        )
        if config.heads % config.kv_heads:
            self._refuse(f"num_attention_heads {config.heads} is not a multiple of kv heads {config.kv_heads}")
        if config.head_dim % 2:
            self._refuse(f"head_dim {config.head_dim} is odd and can't be rotated; download the model again")
        return config

    def _architecture(self) -> str:
        names = self._raw.get("architectures")
        name = names[0] if isinstance(names, list) and names else "(none)"
        if name not in FAMILIES:
            self._refuse(f"architecture {name} is not supported; use a model of {', '.join(FAMILIES)}")
        return str(name)

    def _refuse_unsupported(self) -> None:
        for key, wanted in (("hidden_act", "silu"), ("partial_rotary_factor", 1)):
            found = self._raw.get(key, wanted)
            if found != wanted:
                self._refuse(f"{key} {found!r} is not supported, only {wanted!r}; use another model")
        if self._raw.get("quantization_config") is not None:
            self._refuse("quantization_config: quantized weights are not supported; use the unquantized model")

    def _window(self, family: Family) -> int | None:
        used = not family.window_switch or self._flag("use_sliding_window")
        window = self._raw.get("sliding_window", DEFAULT_WINDOW) if used else None
        full = {"full_attention"} if window is None else {"full_attention", "sliding_attention"}
        for kind in self._raw.get("layer_types") or ():
            if kind not in full:
                self._refuse(f"layer_types has {kind!r}, only full_attention is supported; use another model")
        return None if window is None else self._int("sliding_window", DEFAULT_WINDOW)

    def _rope(self) -> Rope:
        raw = self._raw.get("rope_parameters") or self._raw.get("rope_scaling") or {}
        if not isinstance(raw, dict) or any(isinstance(value, dict) for value in raw.values()):
            self._refuse(f"rope parameters {raw!r} are not one flat object; use a model that rotates all layers alike")
        kind = raw.get("rope_type") or raw.get("type") or "default"
        if kind not in ROPE_TYPES:
            self._refuse(f"rope_type {kind!r} is not supported; use a model with one of {', '.join(ROPE_TYPES)}")
        theta = self._float({"rope_theta": self._raw.get("rope_theta", 10000.0), **raw}, "rope_theta")
        if kind == "default":
            return Rope(kind, theta)
        rope = Rope(kind, theta, **{name: self._float(raw, key) for key, name in LLAMA3_KEYS.items()})
        if rope.low_freq_factor >= rope.high_freq_factor:
            self._refuse(
                f"low_freq_factor {rope.low_freq_factor:g} is not below high_freq_factor {rope.high_freq_factor:g}; "
                "download the model again"
            )
        return rope

    def _eos_ids(self) -> tuple[int, ...]:
        found = self._raw.get("eos_token_id")
        ids = found if isinstance(found, list) else [] if found is None else [found]
        if any(type(token) is not int for token in ids):
            self._refuse(f"eos_token_id is {found!r}, token ids are needed; download the model again")
        return tuple(ids)

    def _flag(self, key: str) -> bool:
        found = self._raw.get(key)
        if found is not None and not isinstance(found, bool):
            self._refuse(f"{key} is {found!r}, true or false is needed; download the model again")
        return bool(found)

    def _int(self, key: str, default: int | None = None) -> int:
        found = self._raw.get(key)
        found = default if found is None else found
        if isinstance(found, bool) or not isinstance(found, int) or found < 1:
            self._refuse(f"{key} is {found!r}, a positive integer is needed; download the model again")
        return found

    def _float(self, table: dict[str, Any], key: str) -> float:
        found = table.get(key)
        if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < math.inf:
            self._refuse(f"{key} is {found!r}, a positive number is needed; download the model again")
        return float(found)

    def _refuse(self, why: str) -> NoReturn:
        raise ModelError(f"{self._path}: {why}")
