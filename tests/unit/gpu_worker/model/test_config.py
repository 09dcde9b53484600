"""What config.json says is read, and what isn't supported is refused by name."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from services.gpu_worker.model.config import ModelConfig, Rope, read_config
from shared.errors import ModelError
from shared.geometry import Part

STRETCH = {
    "type": "llama3",
    "factor": 32,
    "low_freq_factor": 1,
    "high_freq_factor": 4,
    "original_max_position_embeddings": 8192,
}


@pytest.fixture
def edited(tiny_folder: Path, tmp_path: Path) -> Any:
    def edit(**changes: Any) -> Path:
        raw = json.loads((tiny_folder / "config.json").read_text())
        raw.update(changes)
        kept = {key: value for key, value in raw.items() if value != "(removed)"}
        (tmp_path / "config.json").write_text(json.dumps(kept))
        return tmp_path

    return edit


def test_reads_a_saved_model(tiny_folder: Path) -> None:
    assert read_config(tiny_folder) == ModelConfig(
        architecture="LlamaForCausalLM",
        layers=3,
        heads=6,
        kv_heads=2,
        head_dim=8,
        hidden=24,
        intermediate=40,
        rms_eps=1e-5,
        rope=Rope("default", 100000.0),
        vocab=97,
        max_positions=256,
        tied_embeddings=True,
        eos_ids=(1, 2),
    )


def test_older_spellings_and_defaults(edited: Any) -> None:
    removed = dict.fromkeys(("rope_parameters", "head_dim", "num_key_value_heads", "tie_word_embeddings"), "(removed)")
    config = read_config(edited(**removed, rope_theta=5e5, rope_scaling=STRETCH, eos_token_id=7))
    assert config.rope == Rope("llama3", 5e5, 32, 1, 4, 8192)
    assert (config.head_dim, config.kv_heads, config.tied_embeddings, config.eos_ids) == (4, 6, False, (7,))
    assert read_config(edited(**removed, eos_token_id=None)).rope == Rope("default", 10000.0)
    assert read_config(edited(eos_token_id=None)).eos_ids == ()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            "MambaForCausalLM is not supported; use a model of LlamaForCausalLM, M",
        ),
        ({"architectures": "(removed)"}, r"\(none\) is not supported"),
        ({"architectures": "LlamaForCausalLM"}, r"\(none\) is not supported"),
        ({"architectures": ["Qwen3ForCausalLM"], "head_dim": "(removed)"}, "head_dim is None"),
        ({"head_dim": 5}, "head_dim 5 is odd"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"hidden_size": 3, "head_dim": "(removed)"}, "head_dim is 0"),
        ({"num_hidden_layers": "(removed)"}, "num_hidden_layers is None, a positive integer is needed"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"rms_norm_eps": "(removed)"}, "rms_norm_eps is None, a positive number is needed"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"attention_bias": "yes"}, "attention_bias is 'yes', true or false is needed"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has 'sliding_attention'"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window is 0"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>', token ids are needed"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantized weights are not supported"),
        ({"num_key_value_heads": 4}, "num_attention_heads 6 is not a multiple"),
        *(
            ({"rope_parameters": {"rope_type": kind, "rope_theta": 1.0}}, f"rope_type '{kind}' is not supported")
            for kind in ("linear", "dynamic", "yarn", "longrope")
        ),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0}}, "factor is None, a positive number"),
        ({"rope_parameters": STRETCH | {"low_freq_factor": 4}}, "low_freq_factor 4 is not below high_freq_factor 4"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "are not one flat object"),
        ({"rope_parameters": ["yarn"]}, "are not one flat object"),
        ({"rope_parameters": {"rope_theta": "high"}}, "rope_theta is 'high'"),
    ],
)
def test_refuses_by_name(edited: Any, changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ModelError, match=match):
        read_config(edited(**changes))


@pytest.mark.parametrize(("content", "match"), [(None, "can't be read"), ("{", "not JSON"), ("[]", "holds a list")])
def test_refuses_what_is_not_a_configuration(tmp_path: Path, content: str | None, match: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=match):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("architecture", "changes", "found"),
    [
        ("LlamaForCausalLM", {"attention_bias": True}, (True, True, False, False)),
        ("LlamaForCausalLM", {"mlp_bias": True}, (False, False, True, False)),
        ("MistralForCausalLM", {"attention_bias": True, "mlp_bias": True}, (False, False, False, False)),
        ("Qwen2ForCausalLM", {}, (True, False, False, False)),
        ("Qwen3ForCausalLM", {}, (False, False, False, True)),
        ("Qwen3ForCausalLM", {"attention_bias": True}, (True, True, False, True)),
    ],
)
def test_biases_and_norms_follow_the_architecture(
    edited: Any, architecture: str, changes: dict[str, Any], found: tuple[bool, ...]
) -> None:
    config = read_config(edited(architectures=[architecture], **changes))
    assert (config.qkv_bias, config.out_bias, config.mlp_bias, config.qk_norm) == found


@pytest.mark.parametrize(
    ("architecture", "changes", "window"),
    [
        ("MistralForCausalLM", {}, 4096),  # transformers' default
        ("MistralForCausalLM", {"sliding_window": None}, None),
        ("MistralForCausalLM", {"sliding_window": 64}, 64),
        ("Qwen2ForCausalLM", {"sliding_window": 64, "use_sliding_window": False}, None),
        ("Qwen3ForCausalLM", {"sliding_window": 64, "use_sliding_window": True}, 64),
        (
            "Qwen3ForCausalLM",
            {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]},
            4096,
        ),
    ],
)
def test_windows(edited: Any, architecture: str, changes: dict[str, Any], window: int | None) -> None:
    assert read_config(edited(architectures=[architecture], **changes)).sliding_window == window


def test_page_geometry(tiny_folder: Path) -> None:
    geometry = read_config(tiny_folder).page_geometry(16, "bfloat16")
    assert geometry.parts == (Part("k", 2, 8, "bfloat16"), Part("v", 2, 8, "bfloat16"))
    assert geometry.token_bytes == 2 * 3 * 2 * 8 * 2


def test_needs_no_torch() -> None:
    code = "import sys, services.gpu_worker.model.config; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_config_alone_is_no_model(tiny_folder: Path, tmp_path: Path) -> None:
    from services.gpu_worker.model.load import load_model

    shutil.copy(tiny_folder / "config.json", tmp_path)
    with pytest.raises(ModelError, match=r"holds neither model.safetensors nor model.safetensors.index.json"):
        load_model(tmp_path)
    with pytest.raises(ModelError, match="dtype 'int8' is not one of float32"):
        load_model(tiny_folder, "int8")
