"""A real worker service in this process, driven through a real socket by a fake scheduler."""

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save_file

from services.gpu_worker import service
from services.gpu_worker.engine import Engine, build_engine
from services.storage.page_server import PageServer
from shared import link, test_hooks
from shared.config import Config, load_config
from shared.geometry import HostLayout
from shared.link import new_epoch
from shared.messages.storage import Holder
from shared.messages.worker import MapSegment, SegmentMapped
from shared.segment_files import list_holders
from shared.segments import OwnedSegment, create_segment
from tests.unit.gpu_worker.service.fake_scheduler import LAYERS, PAGE, VOCABULARY, WAIT_S, FakeScheduler, Stack

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "torch_dtype": "float32",
}


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(SHAPE))
    generator = torch.Generator().manual_seed(1)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.3

    tensors = {"model.embed_tokens.weight": weight(VOCABULARY, 32), "lm_head.weight": weight(VOCABULARY, 32)}
    tensors["model.norm.weight"] = 1 + weight(32)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name, rows in (("q", 32), ("k", 16), ("v", 16), ("o", 32)):
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = weight(rows, 32)
        tensors[f"{prefix}mlp.gate_proj.weight"] = weight(48, 32)
        tensors[f"{prefix}mlp.up_proj.weight"] = weight(48, 32)
        tensors[f"{prefix}mlp.down_proj.weight"] = weight(32, 48)
        tensors[f"{prefix}input_layernorm.weight"] = 1 + weight(32)
        tensors[f"{prefix}post_attention_layernorm.weight"] = 1 + weight(32)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def layout() -> HostLayout:
    """Of host pages."""
    return "page_first_direct"


@pytest.fixture
def config(model_folder: Path, tmp_path: Path, layout: HostLayout) -> Config:
    return load_config(
        None,
        [
            f"run.folder={tmp_path}",
            f"model.path={model_folder}",
            "model.dtype=float32",
            f"cache.page_size={PAGE}",
            "cache.device_tokens=256",
            f"cache.host_layout={layout}",
            "scheduler.max_running=4",
            "worker.threads=1",
        ],
    )


@pytest.fixture
def hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which a test arms points of the worker."""
    folder = tmp_path / "hooks"
    folder.mkdir()
    monkeypatch.setattr(test_hooks, "folder", folder)
    return folder


@pytest.fixture(params=["map", "remote"])
def host_path(request: pytest.FixtureRequest) -> str:
    """How the worker gets at host pages: every test with a stack must hold for both ways."""
    path: str = request.param
    return path


@asynccontextmanager
async def page_server(segment: OwnedSegment) -> AsyncIterator[PageServer]:
    """A storage's page server beside the test."""
    with tempfile.TemporaryDirectory(prefix="kvtide-") as sockets:  # a socket's path has at most 107 bytes
        server = PageServer(f"ipc://{sockets}/pages.sock", lambda epoch: segment if epoch == segment.epoch else None)
        running = asyncio.create_task(server.run())
        try:
            yield server
        finally:
            running.cancel()
            await asyncio.wait({running})
            server.close()


def _mappers(folder: Path) -> list[Holder]:
    return list_holders(folder, "test", "storage-0").held


async def left(server: PageServer) -> None:
    """Return when no worker is in the server's session list."""
    async with asyncio.timeout(WAIT_S):
        while server.holders():  # noqa: ASYNC110 - nobody is told
            await asyncio.sleep(0.01)


@pytest.fixture
async def stack(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host_path: str
) -> AsyncIterator[Stack]:
    """A running worker with a host pool of 32 pages."""
    config = replace(config, worker=replace(config.worker, host_path=host_path))
    engines: list[Engine] = []

    def build(config: Config) -> Engine:
        engines.append(build_engine(config))
        return engines[-1]

    monkeypatch.setattr(service, "build_engine", build)
    monkeypatch.setattr(link, "HELLO_RETRY_S", 0.02)
    scheduler = FakeScheduler(config.scheduler_endpoint)
    stop = asyncio.Event()
    worker = asyncio.create_task(service.serve(config, "worker", stop))
    try:
        hello = await scheduler.welcome()
        segment = create_segment(
            tmp_path, "storage-0", "test", new_epoch(), hello.geometry, hello.model_fingerprint, pages=32
        )
        async with page_server(segment) as server:
            info = replace(segment.info("storage-0"), pages_endpoint="" if host_path == "map" else server.endpoint)
            mapped = await scheduler.ask(MapSegment(scheduler.op(), info))
            assert isinstance(mapped, SegmentMapped)
            holders = server.holders if host_path == "remote" else partial(_mappers, tmp_path)
            yield Stack(scheduler, engines[0], hello, segment, info, holders, server)
            stop.set()
            await asyncio.wait_for(worker, WAIT_S)
            await left(server)
        assert not list(tmp_path.glob("*.lock")), "the worker still holds the segment"
        segment.close()
    finally:
        worker.cancel()
        scheduler.close()
