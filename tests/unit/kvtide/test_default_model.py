"""The default model: its cache folder, its tokenizer, its weights."""

import fcntl
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jinja2.sandbox
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from kvtide.default_model import __main__, cache, convert, ensure_default_model, source
from kvtide.default_model.tokenizer import build_tokenizer
from shared.errors import CapacityError, ModelError

# Makes the folder argv[1] with one file that holds this process's id, once a line on stdin lets it go on.
MAKER = """
import os, sys
from pathlib import Path
from kvtide.default_model.cache import ensure_folder

def fill(folder):
    print("filling", flush=True)
    (folder / "half").write_text("x")
    sys.stdin.readline()
    (folder / "pid").write_text(str(os.getpid()))

print(ensure_folder(Path(sys.argv[1]), fill, lambda line: print("waiting", flush=True)), flush=True)
"""

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<reponame>", "<file_sep>", "<filename>"]
SPECIAL += ["<gh_stars>", "<issue_start>", "<issue_comment>", "<issue_closed>", "<jupyter_start>", "<jupyter_text>"]
SPECIAL += ["<jupyter_code>", "<jupyter_output>", "<jupyter_script>", "<empty_output>"]

# The vocabulary has no token for these bytes, nor for F1 and F2, with which U+40000 to U+BFFFF (unassigned) begin.
NO_TOKEN = "\x04\x06\x13\x14\x16\x1d"

PROSE = """The capital of France is Paris. The capital of Germany is Berlin. The capital of Italy is Rome. Water freezes
at zero degrees Celsius and boils at one hundred degrees Celsius. The sun rises in the east and sets in the west.
Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday."""

MESSAGES = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "4"}]


def ignore(_: str) -> None:
    """A progress callback that drops its lines."""


def start_maker(target: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", MAKER, str(target)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def read_line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def fill_one(folder: Path) -> None:
    (folder / "file").write_text("new")


@pytest.fixture(scope="session")
def model() -> Path:
    return ensure_default_model()


@pytest.fixture(scope="session")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model / "tokenizer.json"))


@pytest.fixture(scope="session")
def tokenizer_config(model: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((model / "tokenizer_config.json").read_text())
    return config


# The cache folder.


def test_two_processes_at_once_end_with_the_same_good_folder(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with start_maker(target) as first, start_maker(target) as second:
        lines = [read_line(first), read_line(second)]
        assert sorted(lines) == ["filling", "waiting"]
        maker, waiter = (first, second) if lines[0] == "filling" else (second, first)
        assert not target.exists()
        assert maker.communicate("go\n", timeout=30)[0].strip() == str(target)
        assert waiter.communicate("go\n", timeout=30)[0].strip() == str(target)
    assert (target / "pid").read_text() == str(maker.pid)
    assert cache.is_complete(target)
    assert {path.name for path in tmp_path.iterdir()} == {"model", "model.lock"}


def test_killed_maker_leaves_nothing_usable_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with start_maker(target) as maker:
        assert read_line(maker) == "filling"
        maker.send_signal(signal.SIGKILL)
    assert not target.exists()
    assert len(list(tmp_path.glob("model.making-*"))) == 1
    assert cache.ensure_folder(target, fill_one, ignore) == target
    assert (target / "file").read_text() == "new"
    assert not (target / "half").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"model", "model.lock"}


def test_failed_conversion_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise ModelError("no")

    with pytest.raises(ModelError, match="no"):
        cache.ensure_folder(tmp_path / "model", fail, ignore)
    assert [path.name for path in tmp_path.iterdir()] == ["model.lock"]


@pytest.mark.parametrize("damage", ["shorter", "missing", "manifest"])
def test_damaged_folder_is_made_again(tmp_path: Path, damage: str) -> None:
    target = cache.ensure_folder(tmp_path / "model", fill_one, ignore)
    match damage:
        case "shorter":
            (target / "file").write_text("n")
        case "missing":
            (target / "file").unlink()
        case "manifest":
            (target / cache.MANIFEST).write_text("{")
    assert not cache.is_complete(target)
    cache.ensure_folder(target, fill_one, ignore)
    assert cache.is_complete(target)
    assert (target / "file").read_text() == "new"


def test_complete_folder_is_not_filled_again(tmp_path: Path) -> None:
    target = cache.ensure_folder(tmp_path / "model", fill_one, ignore)
    assert cache.ensure_folder(target, lambda _: pytest.fail("filled twice"), pytest.fail) == target


def test_held_lock_is_an_error_in_bounded_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "LOCK_TIMEOUT_S", 0.0)
    lines: list[str] = []
    with (tmp_path / "model.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ModelError, match=r"model\.lock was held .* end that process"):
            cache.ensure_folder(tmp_path / "model", fill_one, lines.append)
    assert len(lines) == 1


def test_small_disk_and_unwritable_place_name_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="KVTIDE_CACHE"):
        cache.ensure_folder(tmp_path / "file" / "model", fill_one, ignore)
    monkeypatch.setattr(cache, "NEEDED_BYTES", 1 << 60)
    with pytest.raises(CapacityError, match=r"MiB free, .* KVTIDE_CACHE"):
        cache.ensure_folder(tmp_path / "model", fill_one, ignore)


def test_cache_root_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KVTIDE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache.cache_root() == tmp_path / ".cache" / "kvtide"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.cache_root() == tmp_path / "xdg" / "kvtide"
    monkeypatch.setenv("KVTIDE_CACHE", "~/own")
    assert cache.cache_root() == tmp_path / "own"


def test_missing_package_says_what_to_do(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(source, "PACKAGE", "kvtide-no-such-package")
    assert __main__.main() == 1
    assert "'kvtide-no-such-package' is not installed: run `make setup`" in capsys.readouterr().err


# The conversion.


def test_unpermute_undoes_the_interleaving() -> None:
    heads, half, columns = 3, 4, 5
    weight = np.arange(heads * 2 * half * columns, dtype=np.float32).reshape(-1, columns)
    interleaved = weight.reshape(heads, 2, half, columns).swapaxes(1, 2).reshape(weight.shape)
    np.testing.assert_array_equal(convert.unpermute(interleaved, heads), weight)


def test_unsupported_files_are_refused_by_name() -> None:
    with pytest.raises(ModelError, match="'qwen3'"):
        convert.model_config({"general.architecture": "qwen3"})
    with pytest.raises(ModelError, match=r"'output\.weight'"):
        convert.hf_name("output.weight")
    with pytest.raises(ModelError, match="'llama-bpe'"):
        build_tokenizer({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "llama-bpe"})


def test_config_has_the_exact_numbers(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-05
    assert config["rope_theta"] == 100000.0
    assert (config["num_hidden_layers"], config["num_attention_heads"], config["num_key_value_heads"]) == (30, 9, 3)
    assert config["torch_dtype"] == "bfloat16"
    assert json.loads((model / "generation_config.json").read_text())["eos_token_id"] == [2, 0]


def test_folder_can_be_read_by_others(model: Path) -> None:
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in model.iterdir())


# The tokenizer.


@given(text=st.text(st.characters(max_codepoint=0x3FFFF, exclude_categories=["Cs"], exclude_characters=NO_TOKEN)))
def test_text_survives_encode_and_decode(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("text", ["12", "\n\n1", "x2024y", " 007", "3.14159"])
def test_every_digit_is_a_token(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text).tokens
    digits = [token for token in tokens if any(char.isdigit() for char in token)]
    assert digits == [char for char in text if char.isdigit()]


def test_special_tokens_are_one_id_each(tokenizer: Tokenizer) -> None:
    assert [tokenizer.encode(token).ids for token in SPECIAL] == [[id] for id in range(17)]
    assert tokenizer.encode("a<|im_end|>b").tokens == ["a", "<|im_end|>", "b"]
    assert tokenizer.decode([1, 2]) == ""


def test_chat_template_renders_the_prompt(tokenizer_config: dict[str, Any]) -> None:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(tokenizer_config["chat_template"])
    assert template.render(messages=MESSAGES, add_generation_prompt=True) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n<|im_start|>assistant\n"
    )


# The folder as another library sees it.


@pytest.mark.integration
def test_transformers_reads_the_same_tokenizer(
    model: Path, tokenizer: Tokenizer, tokenizer_config: dict[str, Any]
) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(model)
    for text in [
        "\n\n1",
        "year 2024, 3.14",
        "def f(x):\n\treturn x",
        "naïve 東京 🙂",
        "<|im_start|>user\nhi<|im_end|>",
    ]:
        assert theirs(text)["input_ids"] == tokenizer.encode(text).ids
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    ours = environment.from_string(tokenizer_config["chat_template"])
    for more in (True, False):
        rendered = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=more)
        assert rendered == ours.render(messages=MESSAGES, add_generation_prompt=more)
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (1, 2, 2)


@pytest.mark.integration
def test_transformers_computes_with_the_weights(model: Path, tokenizer: Tokenizer) -> None:
    import torch
    from transformers import LlamaForCausalLM

    llama = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    capital = tokenizer.encode("The capital of France is").ids
    prose = tokenizer.encode(PROSE).ids
    with torch.inference_mode():
        logits = llama(torch.tensor([capital])).logits[0, -1]
        loss = float(llama(torch.tensor([prose]), labels=torch.tensor([prose])).loss)
    assert tokenizer.decode([int(logits.argmax())]) == " Paris"
    assert llama.config.rms_norm_eps == 1e-05
    # Measured: 1.76; with q and k rows left in the order of GGUF 3.87, with one of the two 8.95.
    assert loss < 2.5, loss
