"""`kvtide bench storage`: page files against the raw disk and against other stores, in the same run.

The raw peer moves the same memory between as many threads and one pre-allocated file on the same file system, in order,
with O_DIRECT; nobody calls fsync. Cold files are those that the kernel was told to forget. What is set and got warm is
in the kernel's cache (`storage.direct_writes` false). With `--peers` SGLang's file store, which has one thread, sets
and gets as many pages in turn; where `make lmcache` has installed it, so does an LMCache server, through our client.
"""

import asyncio
import contextlib
import mmap
import os
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvtide.bench.core.peer import JOBS, Peer
from kvtide.bench.lmcache import installed, lmcache_server
from kvtide.bench.rows import Row, at_most, compared
from kvtide.private_folder import private_folder
from services.storage.backend import MAX_BATCH, Backend, ModelPages
from services.storage.hash_file import HashFileBackend
from services.storage.lmcache_store import LmcacheStore
from services.storage.page_batch import Policy
from services.storage.page_file import PageFormat
from services.storage.sealed import SealedBackend
from shared.config import Config
from shared.errors import KvtideError
from shared.geometry import PageGeometry, Part
from shared.page_hash import DIGEST_BYTES
from shared.segments import Checksums

SIZES = {2**20: 0.75, 2**18: 0.6}  # bytes of a page: goal of a cold get
SET_GOAL = 0.75
SGLANG_GOAL = 2.0  # times the speed of SGLang's file store
LMCACHE_GOAL = 3.0
SGLANG, SGLANG_JOBS = "s23", JOBS.with_name("sglang_files.py")
ROUND_BYTES = 96 * 2**20  # long beside a disk's own delays
ROUNDS = 5
EXISTS_MS = 0.2
LOOKUPS = 50
MODEL = bytes(32)  # fingerprint of no model
UNIT = 32 * 2**10  # bytes of a (part, layer): 64 tokens of 4 heads of 64 bfloat16
LMCACHE_TIMEOUT_S = 30.0

Speeds = dict[str, list[float]]  # GB/s of each round


class Data(NamedTuple):
    """The pages of one round, in anonymous memory, as a host pool's."""

    buffers: list[memoryview]
    checksums: list[Checksums]
    size: int  # bytes of a page


class Stores(NamedTuple):
    """What takes part. Each sets and gets the same pages."""

    folder: Path  # of `direct`
    direct: ModelPages
    cached: ModelPages  # the same, through the kernel's cache
    raw: "Raw"
    sglang: Peer | None
    lmcache: ModelPages | None


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
    threads, verify = config.storage.io_threads, config.cache.checksums
    geometry = PageGeometry(64, size // UNIT // 2, (Part("k", 4, 64, "bfloat16"), Part("v", 4, 64, "bfloat16")))
    data = _data(geometry)
    async with contextlib.AsyncExitStack() as stack:

        async def pages_of(backend: Backend) -> ModelPages:
            stack.push_async_callback(backend.close)
            await backend.start()
            return await backend.of_model(MODEL, geometry)

        def files(name: str, direct: bool) -> HashFileBackend:
            return HashFileBackend(folder / name, 4 * ROUNDS * ROUND_BYTES, 0, threads, policy=Policy(verify, direct))

        lmcache = None
        if peers and installed():
            server = stack.enter_context(lmcache_server(folder, 1 + 4 * ROUND_BYTES // 2**30))
            store = LmcacheStore(f"127.0.0.1:{server}")
            lmcache = await pages_of(SealedBackend("lmcache", store, LMCACHE_TIMEOUT_S, threads, verify=verify))
        stores = Stores(
            folder / "direct",
            await pages_of(files("direct", True)),
            await pages_of(files("cached", False)),
            stack.enter_context(_raw(folder, data, threads)),
            stack.enter_context(Peer(peers, SGLANG, folder, SGLANG_JOBS)) if peers else None,
            lmcache,
        )
        speeds: Speeds = defaultdict(list)
        lookups: list[float] = []
        await _round(stores, data, ROUNDS, defaultdict(list), [])  # not counted: files make their folders
        for turn in range(ROUNDS):
            await _round(stores, data, turn, speeds, lookups)
    return _rows(speeds, lookups, f"{size // 2**10} KiB pages", threads, goal)


async def _round(stores: Stores, data: Data, turn: int, speeds: Speeds, lookups: list[float]) -> None:
    digests = [secrets.token_bytes(DIGEST_BYTES) for _ in data.buffers]

    async def raw(name: str, call: Callable[..., int], new_file: bool = False) -> None:
        speeds[name].append(await asyncio.to_thread(stores.raw.move, call, new_file))

    async def sglang(function: str) -> None:
        if stores.sglang is not None:
            arguments = {"turn": turn, "count": len(data.buffers), "size": data.size}
            seconds = await asyncio.to_thread(stores.sglang.seconds, function, "", **arguments)
            speeds[f"sglang {function}"].append(ROUND_BYTES / 1e9 / seconds)

    await raw("raw write", os.pwritev)
    speeds["set"].append(await _set(stores.direct, data, digests))
    await raw("raw write, new", os.pwritev, new_file=True)
    speeds["set cached"].append(await _set(stores.cached, data, digests))
    await sglang("set")
    if stores.lmcache is not None:
        speeds["lmcache set"].append(await _set(stores.lmcache, data, digests))
    await asyncio.to_thread(_forget, stores.folder)
    await raw("raw read", os.preadv)
    speeds["get cold"].append(await _get(stores.direct, data, digests))
    speeds["get warm"].append(await _get(stores.cached, data, digests))
    await sglang("get")
    if stores.lmcache is not None:
        speeds["lmcache get"].append(await _get(stores.lmcache, data, digests))
        for part in _parts(digests):
            await stores.lmcache.remove(digests[part])
    if len(digests) >= MAX_BATCH:
        lookups += [await _exists_ms(stores.direct, digests[:MAX_BATCH]) for _ in range(LOOKUPS // ROUNDS)]


def _rows(speeds: Speeds, lookups: list[float], pages: str, threads: int, goal: float) -> list[Row]:
    ours, raw = f"{pages}, {threads} threads", f"{threads} threads"
    peers: list[tuple[str, str, str, str, float]] = [
        ("get, cold", "get cold", f"O_DIRECT reads, {raw}", "raw read", goal),
        ("set", "set", f"O_DIRECT writes over a file, {raw}", "raw write", SET_GOAL),
        ("set", "set", f"O_DIRECT writes into a new file, {raw}", "raw write, new", SET_GOAL),
    ]
    for peer, name, ratio in (
        ("SGLang 0.5.23's HiCacheFile, 1 thread", "sglang", SGLANG_GOAL),
        ("an LMCache 0.5.6 server in memory, our client", "lmcache", LMCACHE_GOAL),
    ):
        if speeds[f"{name} set"]:
            peers.append(("set, cached", "set cached", peer, f"{name} set", ratio))
            peers.append(("get, warm", "get warm", peer, f"{name} get", ratio))
    rows = []
    for what, name, peer, its, least in peers:
        conditions = "no fsync" if what.startswith("set") else "checksums on"
        rows.append(compared(f"{what}, {ours}, {conditions}", "GB/s", peer, speeds[name], speeds[its], least))
    if lookups:
        rows.append(at_most(f"exists, {MAX_BATCH} digests", "ms", lookups, EXISTS_MS))
    return rows


def _parts(digests: Sequence[bytes]) -> list[slice]:
    return [slice(start, start + MAX_BATCH) for start in range(0, len(digests), MAX_BATCH)]


async def _set(pages: ModelPages, data: Data, digests: Sequence[bytes]) -> float:
    """GB/s."""
    begun = time.perf_counter()
    for part in _parts(digests):
        done = await pages.batch_set(digests[part], data.buffers[part], data.checksums[part], threading.Event())
        if not all(done):
            raise KvtideError(f"{done.count(False)} pages couldn't be written; the disk or the server may be full")
    return ROUND_BYTES / 1e9 / (time.perf_counter() - begun)


async def _get(pages: ModelPages, data: Data, digests: Sequence[bytes]) -> float:
    """GB/s."""
    begun = time.perf_counter()
    for part in _parts(digests):
        read = await pages.batch_get(digests[part], data.buffers[part], threading.Event())
        if any(each is None for each in read.checksums):
            raise KvtideError(f"pages couldn't be read: {read.corrupt} corrupt, {read.failed} failed")
    return ROUND_BYTES / 1e9 / (time.perf_counter() - begun)


async def _exists_ms(pages: ModelPages, digests: Sequence[bytes]) -> float:
    begun = time.perf_counter()
    await pages.batch_exists(digests)
    return 1e3 * (time.perf_counter() - begun)


def _data(geometry: PageGeometry) -> Data:
    size = geometry.page_bytes
    count = ROUND_BYTES // size
    memory = np.frombuffer(mmap.mmap(-1, count * size), np.uint8).reshape(count, size)
    memory[:] = np.random.default_rng(1).integers(0, 256, (count, size), dtype=np.uint8)
    layout = PageFormat(MODEL, geometry)
    buffers = [row.data for row in memory]
    return Data(buffers, [layout.checksums_of(each) for each in buffers], size)


def _forget(folder: Path) -> None:
    """Write all files to the disk and drop them from the kernel's cache."""
    for path in folder.rglob("*.page"):
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


class Raw:
    """Moves one round's pages between memory and a file by preadv or pwritev."""

    def __init__(self, folder: Path, data: Data, executor: ThreadPoolExecutor, files: contextlib.ExitStack) -> None:
        self._folder, self._data, self._executor, self._files = folder, data, executor, files
        self._serial = 0
        self._file = self._new_file()
        self.move(os.pwritev)  # blocks that were never written are read without the disk

    def move(self, call: Callable[..., int], new_file: bool = False) -> float:
        """GB/s; new_file: into blocks that are allocated and were never written."""
        file, size = self._new_file() if new_file else self._file, self._data.size
        begun = time.perf_counter()
        moves = self._executor.map(lambda at: call(file, [self._data.buffers[at]], at * size), range(self._count))
        if set(moves) != {size}:
            raise KvtideError(f"{self._folder}: a raw read or write was cut short; is the disk full?")
        return ROUND_BYTES / 1e9 / (time.perf_counter() - begun)

    @property
    def _count(self) -> int:
        return len(self._data.buffers)

    def _new_file(self) -> int:
        path = self._folder / f"raw-{self._serial}"
        self._serial += 1
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        except OSError as error:
            detail = f"{path} can't be opened with O_DIRECT ({error.strerror})"
            raise KvtideError(f"{detail}; set storage.folder on a disk") from None
        self._files.callback(os.close, file)
        os.posix_fallocate(file, 0, ROUND_BYTES)
        return file


@contextlib.contextmanager
def _raw(folder: Path, data: Data, threads: int) -> Iterator[Raw]:
    with contextlib.ExitStack() as files, ThreadPoolExecutor(threads) as executor:
        yield Raw(folder, data, executor, files)
