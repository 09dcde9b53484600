"""A local folder of another architecture is served like the default model; a bad one is refused as the stack starts."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from msgspec.structs import replace

from kvtide.chat_client import Answer, chat, client
from kvtide.oracle_process import running_oracle
from kvtide.stack import CHECKOUT, Stack, running_stack
from services.gateway.model import Model
from shared.config import Cache, Config, Gateway, Run, encode_config
from shared.config import Model as ModelSection
from shared.config import Storage as StorageSection
from shared.errors import ModelError
from tests.integration.harness import HOST_TOKENS, PAGE_TOKENS, READY_TIMEOUT_S, ask, settle
from tests.unit.gateway.harness import write_model
from tests.unit.gpu_worker.model.families import Variant, make_folder

NAME = "tiny-qwen3"
CONTEXT = 512  # tokens
DEVICE_TOKENS = 640  # two prompts
QWEN3 = Variant("Qwen3ForCausalLM", {"vocab_size": 260, "max_position_embeddings": CONTEXT, "head_dim": 16})
TOKEN_BYTES = 2 * 3 * 2 * 16 * 4  # k and v, layers, kv heads, head_dim, float32
START_S = 60.0  # a worker imports torch before it reads the folder


@pytest.fixture(scope="module")
def model_folder(module_folder: Path) -> Path:
    """A tiny random Qwen3 whose tokens are bytes, in several weight files."""
    folder = write_model(module_folder / NAME)
    make_folder(folder, QWEN3, max_shard_size="50KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    return folder


@pytest.fixture(scope="module")
def config(module_folder: Path, model_folder: Path) -> Config:
    return Config(
        run=Run(name=module_folder.name.lower(), folder=str(module_folder / "run")),
        model=ModelSection(path=str(model_folder), name=NAME, dtype="float32"),
        cache=Cache(
            page_size=PAGE_TOKENS,
            device_tokens=DEVICE_TOKENS,
            host_bytes=HOST_TOKENS * TOKEN_BYTES,
            prefetch_threshold=2 * PAGE_TOKENS,
            prefetch_policy="wait_complete",
        ),
        storage=StorageSection(folder=str(module_folder / "l3")),
        gateway=Gateway(port=0),
    )


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stack(config: Config) -> AsyncIterator[Stack]:
    async with running_stack(config) as running:
        await running.wait_ready(READY_TIMEOUT_S)
        yield running


def text(number: int) -> str:
    """300 bytes, hence 300 tokens; different numbers differ from the first page on."""
    return "".join(f"{number}-{step * (number + 7) % 97};" for step in range(100))[:300]


@pytest.mark.asyncio(loop_scope="session")
async def test_a_qwen3_folder_is_served_from_every_tier(stack: Stack, model_folder: Path) -> None:
    first = await ask(stack, text(0))
    assert first.prompt_tokens == 300
    await settle(stack)
    others = [await ask(stack, text(number)) for number in range(1, 4)]
    await settle(stack)
    from_host = await ask(stack, text(0))
    assert from_host.host_tokens == 300 // PAGE_TOKENS * PAGE_TOKENS
    from_device = await ask(stack, text(0))
    assert from_device.device_tokens == 300 // PAGE_TOKENS * PAGE_TOKENS
    assert from_host.tokens == from_device.tokens == first.tokens
    async with client(stack.url) as http:
        answer = await chat(http, NAME, [{"role": "user", "content": "hello"}], max_tokens=8)
    assert answer.prompt_tokens == len("<user\nhello>\n<assistant\n")  # each special token is one
    await settle(stack)
    await assert_right(model_folder, [first, *others, from_host, from_device, answer])


@pytest.mark.asyncio(loop_scope="session")
async def test_the_context_of_the_folder_is_the_limit(stack: Stack) -> None:
    async with client(stack.url) as http:
        body = {"model": NAME, "prompt": "x" * (CONTEXT + 1), "max_tokens": 1}
        refused = await http.post("/v1/completions", json=body)
        models = (await http.get("/v1/models")).json()["data"]
    assert refused.status_code == 400
    assert str(CONTEXT) in refused.json()["error"]["message"]
    assert models[0]["max_model_len"] == CONTEXT


async def assert_right(folder: Path, answers: list[Answer]) -> None:
    async with running_oracle(folder) as oracle:
        verdict = await oracle.check([answer.emitted for answer in answers])
    assert (verdict.wrong, verdict.checked) == (0, sum(len(answer.tokens) for answer in answers))


class Copy:
    """A copy of the model folder, to damage."""

    def __init__(self, source: Path, folder: Path, config: Config) -> None:
        self.folder = folder
        shutil.copytree(source, folder)
        self._config = replace(config, model=replace(config.model, path=str(folder)))

    def change(self, **values: object) -> None:
        file = self.folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    def worker(self) -> str:
        """What a worker process says as it refuses the folder."""
        environment = {**os.environ, "KVTIDE_CONFIG_JSON": encode_config(self._config)}
        command = [sys.executable, "-m", "services.gpu_worker"]
        ended = subprocess.run(command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, timeout=START_S)
        assert ended.returncode == 1
        assert "Traceback" not in ended.stderr
        return ended.stderr.splitlines()[-1]

    def gateway(self) -> str:
        """The same of a gateway."""
        with pytest.raises(ModelError) as refused:
            Model(self._config)
        return str(refused.value)


@pytest.fixture
def copy(model_folder: Path, config: Config, tmp_path: Path) -> Copy:
    return Copy(model_folder, tmp_path / "model", config)


def test_a_worker_refuses_another_architecture(copy: Copy) -> None:
    copy.change(architectures=["GemmaForCausalLM"])
    assert "config.json: architecture GemmaForCausalLM is not supported; use a model of Llama" in copy.worker()


def test_a_worker_refuses_a_window_that_is_shorter_than_the_context(copy: Copy) -> None:
    copy.change(use_sliding_window=True, sliding_window=64)
    assert "sliding_window 64 is below the context of 512 tokens" in copy.worker()


def test_a_worker_refuses_a_file_that_is_cut_short(copy: Copy) -> None:
    file = sorted(copy.folder.glob("model-*.safetensors"))[-1]
    file.write_bytes(file.read_bytes()[:-1])
    assert f"{file} is damaged, cut short or not a safetensors file" in copy.worker()


def test_a_worker_refuses_a_missing_file(copy: Copy) -> None:
    file = sorted(copy.folder.glob("model-*.safetensors"))[0]
    file.unlink()
    assert f"{file} is missing, model.safetensors.index.json names it; download the file again" in copy.worker()


def test_a_gateway_refuses_a_bad_tokenizer(copy: Copy) -> None:
    file = copy.folder / "tokenizer.json"
    copy.change(vocab_size=200)
    assert "tokenizer.json has token ids up to 257, the model in config.json knows 200" in copy.gateway()
    file.write_text(file.read_text()[:100])
    assert f"can't read {file}" in copy.gateway()
    file.unlink()
    assert f"{file} is missing: copy it from the model's page" in copy.gateway()


def test_a_gateway_refuses_a_template_that_is_no_text(copy: Copy) -> None:
    file = copy.folder / "chat_template.jinja"
    file.write_bytes(b"\xff\xfe")
    assert f"can't read {file}" in copy.gateway()
