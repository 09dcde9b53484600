"""`kvtide bench remote`: pages over TCP into and out of another process's pool, checksums on, against a raw stream.

Both sides are two processes on this machine. The peer is one TCP connection that carries as many bytes from one buffer
to another: no frames, no checksum, no page's place. Each command waits for its end on both sides.
"""

import asyncio
import multiprocessing
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from kernels import page_copy
from kvtide.bench.rig import LOOPBACK, OWNER, Rig, answer, rig
from kvtide.bench.rows import Row, compared
from kvtide.stack import with_model
from kvtide.tiers import geometry_of
from services.gpu_worker.host_segment import HostSegment
from services.gpu_worker.remote_segment import RemoteSegment
from shared.config import Config
from shared.errors import KvtideError
from shared.geometry import PageGeometry
from shared.link import new_epoch
from shared.messages.storage import SegmentInfo

BATCH = 64  # pages of a command
BATCHES = 3  # that the pools hold: beyond any cache of the processor
ROUNDS = 9
GOAL = 0.5  # of a raw stream
PUT, GET, DONE = b"p", b"g", b"d"


async def measure(config: Config, say: Callable[[str], None]) -> list[Row]:
    """Rows of both directions for the configured model. Raises KvtideError when there is no room for the pools."""
    config = await asyncio.to_thread(with_model, config, say)
    geometry, loop = geometry_of(config), asyncio.get_running_loop()
    say(f"pages of {geometry.page_bytes:,} bytes, {page_copy.which()}")

    def reach(info: SegmentInfo) -> HostSegment:
        return asyncio.run_coroutine_threadsafe(_join(info), loop).result()

    def run() -> list[Row]:
        folder = Path(config.storage.segment_folder)
        with rig(folder, geometry, 1 + BATCHES * BATCH, reach, remote=True) as made:
            return _measure(made, config.model.dtype)

    return await asyncio.to_thread(run)


async def _join(info: SegmentInfo) -> HostSegment:
    segment = _Segment(info, OWNER, new_epoch())
    await segment.join()
    return segment


class _Segment(RemoteSegment):
    """One that another thread than the event loop's may close."""

    def __init__(self, info: SegmentInfo, identity: str, epoch: int) -> None:
        super().__init__(info, identity, epoch, on_lost=lambda: None)  # the copy that runs then fails
        self._loop = asyncio.get_running_loop()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(super().close)


def _measure(made: Rig, dtype: str) -> list[Row]:
    pages = np.arange(1, 1 + BATCHES * BATCH).reshape(BATCHES, BATCH)
    scattered = np.random.default_rng(1).permuted(pages, axis=1)  # host pages, each batch within its own range
    batch_bytes = BATCH * made.geometry.page_bytes
    puts, gets, raw_puts, raw_gets = [], [], [], []
    with _raw(made.geometry) as raw:
        for each in zip(pages, scattered, strict=True):
            made.write(*each)  # fresh memory is filled
        for at in range(ROUNDS):
            batch = pages[at % BATCHES], scattered[at % BATCHES]
            made.release(batch[1])
            raw_puts.append(batch_bytes / raw(PUT))
            puts.append(batch_bytes / made.write(*batch))
            raw_gets.append(batch_bytes / raw(GET))
            gets.append(batch_bytes / made.load(*batch))
    what = f"{BATCH} pages of {dtype} a command over TCP loopback, checksums on, 1 stream"
    peer = "1 raw TCP connection"
    return [
        compared(f"put: device to host, {what}", "GB/s", peer, _giga(puts), _giga(raw_puts), GOAL),
        compared(f"get: host to device, {what}", "GB/s", peer, _giga(gets), _giga(raw_gets), GOAL),
    ]


def _giga(rates: list[float]) -> list[float]:
    return [rate / 1e9 for rate in rates]


@contextmanager
def _raw(geometry: PageGeometry) -> Iterator[Callable[[bytes], float]]:
    """Moves one command's bytes over a connection to another process; seconds."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    size = BATCH * geometry.page_bytes
    process = context.Process(target=_serve_raw, args=(theirs, size), daemon=True)
    process.start()
    theirs.close()
    buffer = np.ones(size, np.uint8).data
    try:
        with socket.create_connection((LOOPBACK, answer(ours))) as connection:

            def move(direction: bytes) -> float:
                begun = time.perf_counter()
                connection.sendall(direction)
                if direction == PUT:
                    connection.sendall(buffer)
                    if connection.recv(1) != DONE:
                        raise KvtideError("the raw connection ended; try again")
                else:
                    _receive(connection, buffer)
                return time.perf_counter() - begun

            for direction in (PUT, GET):
                move(direction)  # fresh memory is filled
            yield move
    finally:
        ours.close()
        process.join()


def _serve_raw(client: Connection, size: int) -> None:
    buffer = np.ones(size, np.uint8).data
    with socket.create_server((LOOPBACK, 0)) as listener:
        client.send(int(listener.getsockname()[1]))
        connection, _ = listener.accept()
    with connection:
        while direction := connection.recv(1):
            if direction == PUT:
                _receive(connection, buffer)
                connection.sendall(DONE)
            else:
                connection.sendall(buffer)


def _receive(connection: socket.socket, buffer: memoryview) -> None:
    got = 0
    while got < len(buffer):
        count = connection.recv_into(buffer[got:])
        if not count:
            raise KvtideError("the raw connection ended; try again")
        got += count
