"""`kvtide bench copy`: pages through the worker's streams into and out of another process's pool, checksums on.

The peer is one thread's plain copy of as many contiguous bytes between the same two memories.
"""

import asyncio
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from kernels import page_copy
from kvtide.bench.rows import Row, compared, plain
from kvtide.stack import with_model
from kvtide.tiers import geometry_of
from services.gpu_worker.host_segment import Chunks, MappedHostSegment, PageIds
from services.gpu_worker.kv_pool import KVPool
from services.gpu_worker.operations import Load, Write
from services.gpu_worker.streams import CpuStream
from services.gpu_worker.transfers import Transfers
from shared.config import Config
from shared.errors import KvtideError
from shared.geometry import PageGeometry
from shared.link import new_epoch
from shared.messages.worker import LoadDone, LoadPages, WriteDone, WritePages
from shared.packed import pack
from shared.page_hash import DIGEST_BYTES
from shared.segments import create_segment

BATCH = 64  # pages of a command
BATCHES = 3  # that the pools hold: beyond any cache of the processor
ROUNDS = 15
GOAL = 0.85  # of a plain copy
DEADLINE_S = 60.0  # a round takes 0.05 s; a busy machine may take seconds
OWNER = "bench"  # storage that owns the pool
MODEL = bytes(32)  # fingerprint of no model

T = TypeVar("T")


class Rig(NamedTuple):
    """The worker's side."""

    geometry: PageGeometry
    pool: KVPool
    segment: MappedHostSegment
    transfers: Transfers
    write_stream: CpuStream
    load_stream: CpuStream
    owner: Connection  # sends an answer to each (host pages, digests, checksums) that it has named


async def measure(config: Config, say: Callable[[str], None]) -> list[Row]:
    """Rows of both directions for the configured model. Raises KvtideError when there is no room for the pools."""
    config = await asyncio.to_thread(with_model, config, say)
    return await asyncio.to_thread(_measure, config, say)


def _measure(config: Config, say: Callable[[str], None]) -> list[Row]:
    geometry = geometry_of(config)
    say(f"pages of {geometry.page_bytes:,} bytes, {page_copy.which()}")
    pages = np.arange(1, 1 + BATCHES * BATCH).reshape(BATCHES, BATCH)
    scattered = np.random.default_rng(1).permuted(pages, axis=1)  # host pages, each batch within its own range
    batch_bytes = BATCH * geometry.page_bytes
    plain_bytes = np.ones((BATCH, geometry.page_bytes), np.uint8)
    to_host, to_device, out, back = [], [], [], []
    with _rig(Path(config.storage.segment_folder), geometry) as rig, closing(_host(rig)) as chunks:
        host = next(chunks).pages
        first = [batch_bytes / _write(rig, *each) for each in zip(pages, scattered, strict=True)]
        for at in range(ROUNDS):
            batch = pages[at % BATCHES], scattered[at % BATCHES]
            region = host[pages[(at + 1) % BATCHES][0] :][:BATCH]  # written longest ago, and anew before it is loaded
            out.append(batch_bytes / _plain(rig.write_stream, region, plain_bytes))
            to_host.append(batch_bytes / _write(rig, *batch))
            back.append(batch_bytes / _plain(rig.load_stream, plain_bytes, region))
            to_device.append(batch_bytes / _load(rig, *batch))
        del host, region
    what = f"{geometry.layout}, {BATCH} pages of {config.model.dtype} a command, checksums on, 1 thread"
    peer = "1 thread's plain copy"
    return [
        compared(f"device to host, {what}", "GB/s", peer, _giga(to_host), _giga(out), GOAL),
        compared(f"host to device, {what}", "GB/s", peer, _giga(to_device), _giga(back), GOAL),
        plain("device to host, the first write into fresh pages", "GB/s", _giga(first)),
    ]


def _host(rig: Rig) -> Chunks:
    """The mapped pool, as a copy sees it."""
    return rig.segment.write(np.empty(0, np.int64), np.empty((0, 0), np.uint32), lambda: None)


def _write(rig: Rig, device_pages: PageIds, host_pages: PageIds) -> float:
    """Seconds of a WritePages on the write stream; then the owner names the pages."""
    command = WritePages(1, OWNER, rig.segment.epoch, pack(device_pages), pack(host_pages))
    write = Write(command, 1, rig.segment, rig.pool.pages, [])
    done, seconds = _on(rig.write_stream, lambda: rig.transfers.write(write))
    if not isinstance(done, WriteDone):
        raise KvtideError(f"a write ended with {done}; the worker's log says more")
    checksums = np.frombuffer(done.checksums, "<u4").reshape(len(host_pages), -1)
    rig.owner.send((host_pages.astype(np.int32), _digests(host_pages), checksums))
    _answer(rig.owner)
    return seconds


def _load(rig: Rig, device_pages: PageIds, host_pages: PageIds) -> float:
    """Seconds of a LoadPages on the load stream."""
    epoch = rig.segment.epoch
    command = LoadPages(1, OWNER, epoch, pack(host_pages), pack(device_pages), _digests(host_pages))
    layers = [rig.load_stream.event() for _ in range(rig.geometry.layers)]
    load = Load(command, 1, rig.segment, rig.pool.pages, layers)
    done, seconds = _on(rig.load_stream, lambda: rig.transfers.load(load))
    if not isinstance(done, LoadDone):
        raise KvtideError(f"a load ended with {done}; the worker's log says more")
    return seconds


def _plain(stream: CpuStream, into: np.ndarray, source: np.ndarray) -> float:
    """Seconds of a plain copy, on the same thread as the pages."""
    return _on(stream, lambda: np.copyto(into, source))[1]


def _on(stream: CpuStream, work: Callable[[], T]) -> tuple[T, float]:
    answers: list[T] = []
    begun = time.perf_counter()
    stream.submit(lambda: answers.append(work())).wait(DEADLINE_S)
    return answers[0], time.perf_counter() - begun


def _giga(rates: list[float]) -> list[float]:
    return [rate / 1e9 for rate in rates]


def _digests(host_pages: PageIds) -> bytes:
    return b"".join(int(page).to_bytes(DIGEST_BYTES, "big") for page in host_pages)


@contextmanager
def _rig(folder: Path, geometry: PageGeometry) -> Iterator[Rig]:
    pages = 1 + BATCHES * BATCH
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    owner = context.Process(target=_own_pool, args=(theirs, folder, geometry, pages), daemon=True)
    owner.start()
    theirs.close()
    streams = CpuStream("write"), CpuStream("load")
    try:
        segment = MappedHostSegment(_answer(ours), OWNER, new_epoch())
        pool = KVPool(geometry, pages)
        for layer in range(geometry.layers):
            for buffer in pool.layer_buffers(layer):
                buffer.view(torch.uint8).random_()  # and not one shared page of zeros
        try:
            yield Rig(geometry, pool, segment, Transfers(pool, geometry, True), *streams, ours)
        finally:
            segment.close()
    finally:
        for stream in streams:
            stream.close(DEADLINE_S)
        ours.close()  # the owner ends
        owner.join(DEADLINE_S)


def _answer(owner: Connection) -> Any:
    """The owner's next message; its error is raised here."""
    if not owner.poll(DEADLINE_S):
        raise KvtideError(f"the pool's process didn't answer within {DEADLINE_S:g} s; try again on a quieter machine")
    answer = owner.recv()
    if isinstance(answer, str):
        raise KvtideError(answer)
    return answer


def _own_pool(worker: Connection, folder: Path, geometry: PageGeometry, pages: int) -> None:
    """The other process: makes a segment and names pages, until the worker hangs up."""
    stack = f"bench-{os.getpid()}"
    try:
        segment = create_segment(folder, OWNER, stack, new_epoch(), geometry, MODEL, pages)
    except KvtideError as error:
        worker.send(str(error))
        return
    try:
        worker.send(segment.info(OWNER))
        while True:
            segment.set_names(*worker.recv())
            worker.send(None)
    except EOFError:
        pass
    finally:
        segment.unlink()
        segment.close()
