"""`kvtide bench copy`: pages through the worker's streams into and out of another process's pool, checksums on.

The peer is one thread's plain copy of as many contiguous bytes between the same two memories.
"""

import asyncio
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import get_args

import numpy as np
from msgspec.structs import replace

from kernels import page_copy
from kvtide.bench.rig import OWNER, Rig, on, rig
from kvtide.bench.rows import Row, compared, plain
from kvtide.stack import with_model
from kvtide.tiers import geometry_of
from services.gpu_worker.host_segment import Chunks, MappedHostSegment
from services.gpu_worker.streams import CpuStream
from shared.config import Config
from shared.geometry import HostLayout, PageGeometry
from shared.link import new_epoch

BATCH = 64  # pages of a command
BATCHES = 3  # that the pools hold: beyond any cache of the processor
ROUNDS = 15
GOALS = {"page_first_direct": 0.85, "layer_first": 0.85}  # of a plain copy; the others go token by token


async def measure(config: Config, say: Callable[[str], None]) -> list[Row]:
    """Rows of both directions for the configured model. Raises KvtideError when there is no room for the pools."""
    config = await asyncio.to_thread(with_model, config, say)
    rows = []
    for layout in get_args(HostLayout):
        geometry = replace(geometry_of(config), layout=layout)
        rows += await asyncio.to_thread(_measure, config, geometry, say)
    return rows


def _measure(config: Config, geometry: PageGeometry, say: Callable[[str], None]) -> list[Row]:
    say(f"pages of {geometry.page_bytes:,} bytes, {page_copy.which()}")
    pages = np.arange(1, 1 + BATCHES * BATCH).reshape(BATCHES, BATCH)
    scattered = np.random.default_rng(1).permuted(pages, axis=1)  # host pages, each batch within its own range
    batch_bytes = BATCH * geometry.page_bytes
    plain_bytes = np.ones((BATCH, geometry.page_bytes), np.uint8)
    to_host, to_device, out, back = [], [], [], []
    folder = Path(config.storage.segment_folder)
    with (
        rig(folder, geometry, 1 + BATCHES * BATCH, lambda info: MappedHostSegment(info, OWNER, new_epoch())) as made,
        closing(_host(made)) as chunks,
    ):
        host = next(chunks).pages.memory
        first = [batch_bytes / made.write(*each) for each in zip(pages, scattered, strict=True)]
        for at in range(ROUNDS):
            batch = pages[at % BATCHES], scattered[at % BATCHES]
            region = host[pages[(at + 1) % BATCHES][0] :][:BATCH]  # written longest ago, and anew before it is loaded
            out.append(batch_bytes / _plain(made.write_stream, region, plain_bytes))
            to_host.append(batch_bytes / made.write(*batch))
            back.append(batch_bytes / _plain(made.load_stream, plain_bytes, region))
            to_device.append(batch_bytes / made.load(*batch))
        del host, region
    what = f"{geometry.layout}, {BATCH} pages of {config.model.dtype} a command, checksums on, 1 thread"
    peer, goal = "1 thread's plain copy", GOALS.get(geometry.layout)
    return [
        compared(f"device to host, {what}", "GB/s", peer, _giga(to_host), _giga(out), goal),
        compared(f"host to device, {what}", "GB/s", peer, _giga(to_device), _giga(back), goal),
        plain(f"device to host, {geometry.layout}, the first write into fresh pages", "GB/s", _giga(first)),
    ]


def _host(made: Rig) -> Chunks:
    """The mapped pool, as a copy sees it."""
    return made.segment.write(np.empty(0, np.int64), np.empty((0, 0), np.uint32), lambda: None)


def _plain(stream: CpuStream, into: np.ndarray, source: np.ndarray) -> float:
    """Seconds of a plain copy, on the same thread as the pages."""
    return on(stream, lambda: np.copyto(into, source))[1]


def _giga(rates: list[float]) -> list[float]:
    return [rate / 1e9 for rate in rates]
