"""`kvtide bench storage`: page files against the raw disk: same file system, size, threads and no fsync on either side.

The peer reads or writes one pre-allocated file with O_DIRECT, in order. Cold files are those that the kernel was told
to forget, warm ones were just read. With `--peers` SGLang's file store, which has one thread, writes and reads as many
pages in turn.
"""

import asyncio
import contextlib
import mmap
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvtide.bench.core.peer import JOBS, Peer
from kvtide.bench.rows import Row, at_most, compared, plain
from kvtide.private_folder import private_folder
from services.storage.backend import MAX_BATCH, ModelPages
from services.storage.hash_file import HashFileBackend
from services.storage.page_batch import Policy
from services.storage.page_file import PageFormat
from shared.config import Config
from shared.errors import KvtideError
from shared.geometry import PageGeometry, Part
from shared.page_hash import DIGEST_BYTES
from shared.segments import Checksums

SIZES = {2**20: 0.75, 2**18: 0.6}  # bytes of a page: goal of a cold get
SET_GOAL = 0.75
SGLANG_GOAL = 2.0  # times the speed of SGLang's file store
SGLANG, SGLANG_JOBS = "s23", JOBS.with_name("sglang_files.py")
ROUND_BYTES = 96 * 2**20  # long beside a disk's own delays
ROUNDS = 5
EXISTS_MS = 0.2
LOOKUPS = 50
MODEL = bytes(32)  # fingerprint of no model
UNIT = 32 * 2**10  # bytes of a (part, layer): 64 tokens of 4 heads of 64 bfloat16

Move = Callable[[Callable[..., int]], float]


class Files(NamedTuple):
    """The backend's side of one page size."""

    folder: Path
    pages: ModelPages
    buffers: list[memoryview]  # the pages of one round, in anonymous memory, as a host pool's
    checksums: list[Checksums]
    size: int  # bytes of a page


async def measure(config: Config, say: Callable[[str], None], peers: Path | None = None) -> list[Row]:
    """Rows of both page sizes, in a folder beside `storage.folder`. peers: made by bench/peers/setup.

    Raises KvtideError without O_DIRECT there.
    """
    parent = config.storage_folder.parent
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    rows: list[Row] = []
    for size, goal in SIZES.items():
        say(f"pages of {size:,} bytes, {config.storage.io_threads} threads, in {parent}")
        with private_folder("kvtide-bench-storage-", parent) as folder:
            rows += await _measure(config, folder, size, goal, peers)
    return rows


async def _measure(config: Config, folder: Path, size: int, goal: float, peers: Path | None) -> list[Row]:
    count, threads = ROUND_BYTES // size, config.storage.io_threads
    backend = HashFileBackend(
        folder / "l3", 4 * ROUNDS * ROUND_BYTES, 0, threads, policy=Policy(config.cache.checksums)
    )
    await backend.start()
    try:
        geometry = PageGeometry(64, size // UNIT // 2, (Part("k", 4, 64, "bfloat16"), Part("v", 4, 64, "bfloat16")))
        files = _files(folder / "l3", await backend.of_model(MODEL, geometry), geometry, count)
        with contextlib.ExitStack() as stack:
            raw = stack.enter_context(_raw(folder / "raw", files, threads))
            sglang = stack.enter_context(Peer(peers, SGLANG, folder, SGLANG_JOBS)) if peers else None
            return await _rounds(files, raw, sglang, threads, goal)
    finally:
        await backend.close()


async def _rounds(files: Files, raw: Move, sglang: Peer | None, threads: int, goal: float) -> list[Row]:
    sets, cold, warm, raw_writes, raw_reads, lookups = [], [], [], [], [], []
    theirs: dict[str, list[float]] = {"set": [], "get": []}

    def their(function: str, turn: int) -> None:
        if sglang is not None:
            seconds = sglang.seconds(function, "", turn=turn, count=len(files.buffers), size=files.size)
            theirs[function].append(ROUND_BYTES / 1e9 / seconds)

    for turn in range(ROUNDS):
        digests = [secrets.token_bytes(DIGEST_BYTES) for _ in files.buffers]
        raw_writes.append(await asyncio.to_thread(raw, os.pwritev))
        sets.append(await _set(files, digests))
        await asyncio.to_thread(their, "set", turn)
        await asyncio.to_thread(_forget, files.folder)
        raw_reads.append(await asyncio.to_thread(raw, os.preadv))
        cold.append(await _get(files, digests))
        await asyncio.to_thread(_warm, files.folder, digests)
        warm.append(await _get(files, digests))
        await asyncio.to_thread(their, "get", turn)
        lookups += [await _exists_ms(files.pages, digests[:MAX_BATCH]) for _ in range(LOOKUPS // ROUNDS)]
    each = f"{files.size // 2**10} KiB pages, {threads} threads"
    rows = [
        compared(f"get, cold, {each}, checksums on", "GB/s", "O_DIRECT reads", cold, raw_reads, goal),
        compared(f"set, {each}, no fsync", "GB/s", "O_DIRECT writes", sets, raw_writes, SET_GOAL),
        plain(f"get, warm, {each}, checksums on", "GB/s", warm),
    ]
    if sglang is not None:
        peer = "SGLang 0.5.23's HiCacheFile, 1 thread"
        rows.append(compared(f"set, {each}, no fsync", "GB/s", peer, sets, theirs["set"], SGLANG_GOAL))
        rows.append(compared(f"get, warm, {each}, checksums on", "GB/s", peer, warm, theirs["get"], SGLANG_GOAL))
    if len(digests) >= MAX_BATCH:
        rows.append(at_most(f"exists, {MAX_BATCH} digests", "ms", lookups, EXISTS_MS))
    return rows


async def _set(files: Files, digests: Sequence[bytes]) -> float:
    """GB/s."""
    begun = time.perf_counter()
    for start in range(0, len(digests), MAX_BATCH):
        part = slice(start, start + MAX_BATCH)
        done = await files.pages.batch_set(digests[part], files.buffers[part], files.checksums[part], threading.Event())
        if not all(done):
            raise KvtideError(f"{done.count(False)} pages couldn't be written; the disk may be full")
    return ROUND_BYTES / 1e9 / (time.perf_counter() - begun)


async def _get(files: Files, digests: Sequence[bytes]) -> float:
    """GB/s."""
    begun = time.perf_counter()
    for start in range(0, len(digests), MAX_BATCH):
        part = slice(start, start + MAX_BATCH)
        read = await files.pages.batch_get(digests[part], files.buffers[part], threading.Event())
        if any(each is None for each in read.checksums):
            raise KvtideError(f"pages couldn't be read: {read.corrupt} corrupt, {read.failed} failed")
    return ROUND_BYTES / 1e9 / (time.perf_counter() - begun)


async def _exists_ms(pages: ModelPages, digests: Sequence[bytes]) -> float:
    begun = time.perf_counter()
    await pages.batch_exists(digests)
    return 1e3 * (time.perf_counter() - begun)


def _files(folder: Path, pages: ModelPages, geometry: PageGeometry, count: int) -> Files:
    size = geometry.page_bytes
    memory = np.frombuffer(mmap.mmap(-1, count * size), np.uint8).reshape(count, size)
    memory[:] = np.random.default_rng(1).integers(0, 256, (count, size), dtype=np.uint8)
    layout = PageFormat(MODEL, geometry)
    buffers = [row.data for row in memory]
    return Files(folder, pages, buffers, [layout.checksums_of(each) for each in buffers], size)


def _forget(folder: Path) -> None:
    """Write all files to the disk and drop them from the kernel's cache."""
    for path in folder.rglob("*.page"):
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def _warm(folder: Path, digests: Sequence[bytes]) -> None:
    """Read these files into the kernel's cache."""
    names = {digest.hex() for digest in digests}
    for path in folder.rglob("*.page"):
        if path.stem in names:
            path.read_bytes()


@contextmanager
def _raw(path: Path, files: Files, threads: int) -> Iterator[Move]:
    """Moves one round's bytes between a file and memory by preadv or pwritev; GB/s."""
    memory = [memoryview(mmap.mmap(-1, files.size)) for _ in range(threads)]
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    except OSError as error:
        detail = f"{path} can't be opened with O_DIRECT ({error.strerror})"
        raise KvtideError(f"{detail}; set storage.folder on a disk") from None
    executor = ThreadPoolExecutor(threads)

    def move(call: Callable[..., int]) -> float:
        def one(at: int) -> int:
            free = memory.pop()
            try:
                return call(file, [free], at * files.size)
            finally:
                memory.append(free)

        begun = time.perf_counter()
        moved = list(executor.map(one, range(len(files.buffers))))
        if set(moved) != {files.size}:
            raise KvtideError(f"{path}: a read or write moved {min(moved)} of {files.size} bytes; is the disk full?")
        return ROUND_BYTES / 1e9 / (time.perf_counter() - begun)

    try:
        os.posix_fallocate(file, 0, ROUND_BYTES)
        move(os.pwritev)  # blocks that were never written are read without the disk
        yield move
    finally:
        executor.shutdown()
        os.close(file)
