"""What a worker computes with: model, pools and streams, made once at its start."""

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil

from kernels import page_copy
from services.gpu_worker.kv_pool import KVPool
from services.gpu_worker.model.config import ModelConfig, read_config
from services.gpu_worker.model.load import load_model
from services.gpu_worker.model.weights import weights_fingerprint
from services.gpu_worker.req_to_token import ReqToToken
from services.gpu_worker.sampling_grammar import Grammars
from services.gpu_worker.stepper import Stepper
from services.gpu_worker.streams import Stream, open_stream
from services.gpu_worker.transfers import Transfers
from shared.config import Config
from shared.errors import CapacityError, ConfigError, ModelError
from shared.geometry import PageGeometry, model_fingerprint

CLOSE_TIMEOUT_S = 5.0  # for all streams: a copy batch takes milliseconds, a step seldom more than a second or two

log = logging.getLogger("kvtide.engine")


@dataclass(frozen=True)
class Engine:
    """One rank's share of a model."""

    geometry: PageGeometry
    fingerprint: bytes  # of the model: 32 bytes
    max_requests: int  # rows
    max_context: int  # tokens of one request
    pool: KVPool
    stepper: Stepper
    transfers: Transfers
    compute: Stream
    loads: Stream
    writes: Stream

    def close(self) -> bool:
        """Stop the streams. False when work still runs after CLOSE_TIMEOUT_S: then memory must not be unmapped."""
        deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        # Loads and steps first: a write may wait for a step, a step for a load.
        closed = [
            stream.close(max(0.0, deadline_s - time.monotonic())) for stream in (self.loads, self.compute, self.writes)
        ]
        if not all(closed):
            log.error("streams_stuck after_s=%.1f", CLOSE_TIMEOUT_S)
        return all(closed)


def build_engine(config: Config) -> Engine:
    """Load the model and allocate everything. Takes seconds.

    Raises ModelError for the model folder, CapacityError for memory, ConfigError for a value that the model can't do.
    """
    if not config.model.path:
        raise ModelError(
            "a worker started by hand needs model.path, a Hugging Face folder; `kvtide serve` sets it for the default "
            "model"
        )
    folder = Path(config.model.path)
    described = read_config(folder)
    max_context = _max_context(config, described)
    geometry = described.page_geometry(config.cache.page_size, config.model.dtype, config.cache.host_layout)
    with ThreadPoolExecutor(1, "fingerprint") as beside:
        fingerprint = beside.submit(weights_fingerprint, folder)
        model = load_model(folder, config.model.dtype)
        pool = _allocate_pool(config, geometry)
        weights = fingerprint.result()
    requests = ReqToToken(config.scheduler.max_running, max_context, geometry.page_size)
    compute, loads, writes = (open_stream(name, config.worker.device) for name in ("compute", "load", "write"))
    transfers = Transfers(
        pool, geometry, config.cache.checksums, others_run=lambda: not (compute.query() and loads.query())
    )
    log.info(
        "engine model=%s layers=%d device_pages=%d device_bytes=%d page_copy=%s",
        *(folder.name, geometry.layers, pool.pages, pool.nbytes, page_copy.which().replace(" ", "_")),
    )
    return Engine(
        geometry=geometry,
        fingerprint=model_fingerprint(geometry, weights),
        max_requests=config.scheduler.max_running,
        max_context=max_context,
        pool=pool,
        stepper=Stepper(model, pool, requests, max_context, Grammars(folder / "tokenizer.json")),
        transfers=transfers,
        compute=compute,
        loads=loads,
        writes=writes,
    )


def _max_context(config: Config, model: ModelConfig) -> int:
    if config.model.max_context > model.max_positions:
        raise ConfigError(
            f"model.max_context {config.model.max_context} is above the model's {model.max_positions}; lower it, "
            "or use 0 for the model's own"
        )
    context, window = config.model.max_context or model.max_positions, model.sliding_window
    if window is not None and context > window:
        raise ModelError(
            f"{config.model.path}: sliding_window {window} is below the context of {context} tokens, and sliding "
            f"windows are not supported; set model.max_context to {window} or less"
        )
    return context


def _allocate_pool(config: Config, geometry: PageGeometry) -> KVPool:
    """A pool whose memory is really there: an overcommitting kernel would kill the process at a later touch."""
    pages = -(-config.cache.device_tokens // geometry.page_size) + 1
    wanted, free = pages * geometry.page_bytes, psutil.virtual_memory().available
    if wanted > free:
        raise CapacityError(
            f"the device pool needs {wanted} bytes ({pages} pages of {geometry.page_bytes}) and {free} are free; lower "
            f"cache.device_tokens ({config.cache.device_tokens})"
        )
    pool = KVPool(geometry, pages)
    for layer in range(geometry.layers):
        for buffer in pool.layer_buffers(layer):
            buffer.zero_()
    return pool
