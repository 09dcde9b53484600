"""A worker's pool and streams beside a host pool in another process: what the copy benchmarks drive."""

import asyncio
import contextlib
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from msgspec.structs import replace

from services.gpu_worker.host_segment import HostSegment, PageIds
from services.gpu_worker.kv_pool import KVPool
from services.gpu_worker.operations import Load, Write
from services.gpu_worker.streams import CpuStream
from services.gpu_worker.transfers import Transfers
from services.storage.page_server import PageServer
from shared.errors import KvtideError
from shared.geometry import PageGeometry
from shared.link import new_epoch
from shared.messages.storage import SegmentInfo
from shared.messages.worker import LoadDone, LoadPages, WriteDone, WritePages
from shared.packed import pack
from shared.page_hash import DIGEST_BYTES
from shared.segments import OwnedSegment, create_segment

DEADLINE_S = 60.0  # a round takes 0.05 s; a busy machine may take seconds
OWNER = "bench"  # storage that owns the pool
MODEL = bytes(32)  # fingerprint of no model
LOOPBACK = "127.0.0.1"

T = TypeVar("T")


class Rig(NamedTuple):
    """The worker's side. Page ids of both pools are 1 .. pages - 1."""

    geometry: PageGeometry
    pool: KVPool
    segment: HostSegment
    transfers: Transfers
    write_stream: CpuStream
    load_stream: CpuStream
    owner: Connection  # sends an answer to each (host pages, digests, checksums) that it has named

    def write(self, device_pages: PageIds, host_pages: PageIds) -> float:
        """Seconds of a WritePages on the write stream; then the owner names the pages."""
        command = WritePages(1, OWNER, self.segment.epoch, pack(device_pages), pack(host_pages))
        write = Write(command, 1, self.segment, self.pool.pages, [])
        done, seconds = on(self.write_stream, lambda: self.transfers.write(write))
        if not isinstance(done, WriteDone):
            raise KvtideError(f"a write ended with {done}; the worker's log says more")
        checksums = np.frombuffer(done.checksums, "<u4").reshape(len(host_pages), -1)
        self.owner.send((host_pages.astype(np.int32), _digests(host_pages), checksums))
        answer(self.owner)
        return seconds

    def load(self, device_pages: PageIds, host_pages: PageIds) -> float:
        """Seconds of a LoadPages on the load stream."""
        epoch = self.segment.epoch
        command = LoadPages(1, OWNER, epoch, pack(host_pages), pack(device_pages), _digests(host_pages))
        layers = [self.load_stream.event() for _ in range(self.geometry.layers)]
        load = Load(command, 1, self.segment, self.pool.pages, layers)
        done, seconds = on(self.load_stream, lambda: self.transfers.load(load))
        if not isinstance(done, LoadDone):
            raise KvtideError(f"a load ended with {done}; the worker's log says more")
        return seconds

    def release(self, host_pages: PageIds) -> None:
        """Have the owner take the names of pages back, so that they can be written over any path."""
        self.owner.send((host_pages.astype(np.int32), None, None))
        answer(self.owner)


def on(stream: CpuStream, work: Callable[[], T]) -> tuple[T, float]:
    """What `work` returns on a stream, and its seconds."""
    answers: list[T] = []
    begun = time.perf_counter()
    stream.submit(lambda: answers.append(work())).wait(DEADLINE_S)
    return answers[0], time.perf_counter() - begun


@contextmanager
def rig(
    folder: Path, geometry: PageGeometry, pages: int, reach: Callable[[SegmentInfo], HostSegment], remote: bool = False
) -> Iterator[Rig]:
    """Pools of `pages` pages each, the device's full of random bytes. reach: makes the worker's view of the host pool.

    remote: the owner also serves its pages over TCP. Raises KvtideError when there is no room for the pools.
    """
    streams = CpuStream("write"), CpuStream("load")
    try:
        with host_pool(folder, geometry, pages, remote) as (owner, info):
            segment = reach(info)
            pool = KVPool(geometry, pages)
            for layer in range(geometry.layers):
                for buffer in pool.layer_buffers(layer):
                    buffer.view(torch.uint8).random_()  # and not one shared page of zeros
            try:
                yield Rig(geometry, pool, segment, Transfers(pool, geometry, True), *streams, owner)
            finally:
                segment.close()
    finally:
        for stream in streams:
            stream.close(DEADLINE_S)


@contextmanager
def host_pool(
    folder: Path, geometry: PageGeometry, pages: int, remote: bool = False
) -> Iterator[tuple[Connection, SegmentInfo]]:
    """A segment of another process: where to send (host pages, digests, checksums) to be named, and what to map.

    remote: the owner also serves its pages over TCP. Raises KvtideError when there is no room for it.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    endpoint = f"tcp://{LOOPBACK}:{_free_port()}" if remote else ""
    owner = context.Process(target=_own_pool, args=(theirs, folder, geometry, pages, endpoint), daemon=True)
    owner.start()
    theirs.close()
    try:
        yield ours, answer(ours)
    finally:
        ours.close()  # the owner ends
        owner.join(DEADLINE_S)


def answer(process: Connection) -> Any:
    """Another process's next message; its error is raised here."""
    if not process.poll(DEADLINE_S):
        raise KvtideError(f"a process didn't answer within {DEADLINE_S:g} s; try again on a quieter machine")
    message = process.recv()
    if isinstance(message, str):
        raise KvtideError(message)
    return message


def _digests(host_pages: PageIds) -> bytes:
    return b"".join(int(page).to_bytes(DIGEST_BYTES, "big") for page in host_pages)


def _free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as listener:
        return int(listener.getsockname()[1])


# ---- the other process ----


def _own_pool(worker: Connection, folder: Path, geometry: PageGeometry, pages: int, endpoint: str) -> None:
    """Make a segment and name its pages, until the worker hangs up."""
    stack = f"bench-{os.getpid()}"
    try:
        segment = create_segment(folder, OWNER, stack, new_epoch(), geometry, MODEL, pages)
    except KvtideError as error:
        worker.send(str(error))
        return
    try:
        asyncio.run(_serve(worker, segment, endpoint))
    finally:
        segment.unlink()
        segment.close()


async def _serve(worker: Connection, segment: OwnedSegment, endpoint: str) -> None:
    serving = None
    if endpoint:
        server = PageServer(endpoint, lambda epoch: segment if epoch == segment.epoch else None)
        serving = asyncio.create_task(server.run())
    worker.send(replace(segment.info(OWNER), pages_endpoint=endpoint))
    with contextlib.suppress(EOFError):
        while True:
            pages, digests, checksums = await asyncio.to_thread(worker.recv)
            if digests is None:
                segment.clear_names(pages)
            else:
                segment.set_names(pages, digests, checksums)
            worker.send(None)
    if serving is not None:
        serving.cancel()
        await asyncio.wait({serving})
        server.close()
