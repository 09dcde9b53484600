"""Reads a Hugging Face folder's config.json. No torch."""

import json
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import msgspec

from shared.errors import ModelError
from shared.geometry import PageGeometry, Part

ARCHITECTURES = ("LlamaForCausalLM",)
ROPE_TYPES = ("default", "llama3")
LLAMA3_KEYS = {  # in config.json: in Rope
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_max_positions",
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

    architecture: str  # of ARCHITECTURES
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

    def page_geometry(self, page_size: int, dtype: str) -> PageGeometry:
        """The geometry of this model's pages on one rank. Raises GeometryError."""
        parts = tuple(Part(name, self.kv_heads, self.head_dim, dtype) for name in ("k", "v"))
        return PageGeometry(page_size=page_size, layers=self.layers, parts=parts)


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
        self._refuse_unsupported()
        heads, hidden = self._int("num_attention_heads"), self._int("hidden_size")
        config = ModelConfig(
            architecture=architecture,
            layers=self._int("num_hidden_layers"),
            heads=heads,
            kv_heads=self._int("num_key_value_heads", heads),
            head_dim=self._int("head_dim", hidden // heads),
            hidden=hidden,
            intermediate=self._int("intermediate_size"),
            rms_eps=self._float("rms_norm_eps"),
            rope=self._rope(),
            vocab=self._int("vocab_size"),
            max_positions=self._int("max_position_embeddings"),
            tied_embeddings=bool(self._raw.get("tie_word_embeddings", False)),
            eos_ids=self._eos_ids(),
        )
        if config.heads % config.kv_heads:
            self._refuse(f"num_attention_heads {config.heads} is not a multiple of kv heads {config.kv_heads}")
        return config

    def _architecture(self) -> str:
        names = self._raw.get("architectures") or ["(none)"]
        if names[0] not in ARCHITECTURES:
            self._refuse(f"architecture {names[0]} is not supported; use a model of {', '.join(ARCHITECTURES)}")
        return str(names[0])

    def _refuse_unsupported(self) -> None:
        for key, wanted in (("attention_bias", False), ("mlp_bias", False), ("hidden_act", "silu")):
            found = self._raw.get(key, wanted)
            if found != wanted:
                self._refuse(f"{key} {found!r} is not supported, only {wanted!r}; use another model")
        if "quantization_config" in self._raw:
            self._refuse("quantization_config: quantized weights are not supported; use the unquantized model")

    def _rope(self) -> Rope:
        raw = self._raw.get("rope_parameters") or self._raw.get("rope_scaling") or {}
        kind = raw.get("rope_type", raw.get("type", "default"))
        theta = float(raw.get("rope_theta", self._raw.get("rope_theta", 10000.0)))
        if kind not in ROPE_TYPES:
            self._refuse(f"rope_type {kind!r} is not supported; use a model with one of {', '.join(ROPE_TYPES)}")
        if kind == "default":
            return Rope(kind, theta)
        stretch = {key: raw.get(key) for key in LLAMA3_KEYS}
        missing = [key for key, value in stretch.items() if not isinstance(value, int | float)]
        if missing:
            self._refuse(f"rope parameter {missing[0]} is {raw.get(missing[0])!r}; download the model again")
        return Rope(kind, theta, **{LLAMA3_KEYS[key]: float(raw[key]) for key in stretch})

    def _eos_ids(self) -> tuple[int, ...]:
        found = self._raw.get("eos_token_id")
        if found is None:
            return ()
        return tuple(found) if isinstance(found, list) else (int(found),)

    def _int(self, key: str, default: int | None = None) -> int:
        found = self._raw.get(key)
        found = default if found is None else found
        if not isinstance(found, int) or found < 1:
            self._refuse(f"{key} is {found!r}, a positive integer is needed; download the model again")
        return int(found)

    def _float(self, key: str) -> float:
        found = self._raw.get(key)
        if not isinstance(found, int | float):
            self._refuse(f"{key} is {found!r}, a number is needed; download the model again")
        return float(found)

    def _refuse(self, why: str) -> NoReturn:
        raise ModelError(f"{self._path}: {why}")
