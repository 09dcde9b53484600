"""Measures every backend that runs here and prints a table; docs/backends.md says how to start it.

A page of the default model (64 tokens, 1.4 MiB), batches of 8 as the storage service makes them, one batch at a time.
Reads come from wherever the store has the page: the disk for files (their default is `direct_writes`), memory for the
servers.
"""

import asyncio
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from services.storage.page_file import PageFormat
from services.storage.transfers import BATCH
from shared.geometry import PageGeometry, Part
from tests.backends import lmcache_rig, mooncake_rig
from tests.backends.lmcache_rig import LmcacheRig, lmcache_server
from tests.backends.mooncake_rig import Cluster, MooncakeRig
from tests.backends.rigs import FileRig, GuideRig, HashFileRig, HiCacheRig, MemoryRig, Rig

GEOMETRY = PageGeometry(64, 30, (Part("k", 3, 64, "bfloat16"), Part("v", 3, 64, "bfloat16")))
MODEL = b"m" * 32
PAGES = 64  # 90 MiB, below every tier's size
ROUNDS = 5
SERVER_GB = 0.5
NODE_BYTES = 512 * 2**20
GO = threading.Event()

Rigs = dict[str, Callable[[Path], Rig]]
LOCAL: Rigs = {rig.kind: rig for rig in (MemoryRig, FileRig, HashFileRig, GuideRig, HiCacheRig)}


async def measure(rig: Rig) -> str:
    """One row of the table: medians of ROUNDS rounds."""
    rig.timeout_s = 30.0
    backend = await rig.make(quota_pages=2_000_000)
    pages = await backend.of_model(MODEL, GEOMETRY)
    host = np.random.default_rng(0).integers(0, 256, (PAGES, GEOMETRY.page_bytes), np.uint8)
    buffers = [memoryview(page) for page in host]
    checksums = [PageFormat(MODEL, GEOMETRY).checksums_of(page) for page in buffers]
    spare = [memoryview(bytearray(GEOMETRY.page_bytes))]
    write, read, look, one = [], [], [], []
    for number in range(ROUNDS):
        digests = [bytes([number, n]) * 16 for n in range(PAGES)]
        batches = [slice(start, start + BATCH) for start in range(0, PAGES, BATCH)]
        start_s = time.monotonic()
        for batch in batches:
            assert all(await pages.batch_set(digests[batch], buffers[batch], checksums[batch], GO))
        write.append(time.monotonic() - start_s)
        start_s = time.monotonic()
        assert await pages.batch_exists(digests) == PAGES
        look.append(time.monotonic() - start_s)
        start_s = time.monotonic()
        for batch in batches:
            found = await pages.batch_get(digests[batch], buffers[batch], GO)
            assert all(each is not None for each in found.checksums)
        read.append(time.monotonic() - start_s)
        for digest in digests[:BATCH]:
            start_s = time.monotonic()
            await pages.batch_get([digest], spare, GO)
            one.append(time.monotonic() - start_s)
        await pages.remove(digests)
    megabytes = PAGES * GEOMETRY.page_bytes / 1e6
    return (
        f"| `{rig.kind}` | {megabytes / statistics.median(write):.0f} | {megabytes / statistics.median(read):.0f} "
        f"| {1000 * statistics.median(one):.1f} | {1000 * statistics.median(look):.1f} |"
    )


@contextmanager
def servers(kinds: list[str], folder: Path) -> Iterator[Rigs]:
    """The rigs of `kinds` that run here."""
    rigs = {kind: rig for kind, rig in LOCAL.items() if kind in kinds}
    ends: list[Callable[[], None]] = []
    if "lmcache" in kinds and not lmcache_rig.MISSING:
        (folder / "lmcache").mkdir()
        server = lmcache_server(folder / "lmcache", SERVER_GB)
        server.start()
        ends.append(server.kill)
        rigs["lmcache"] = lambda path: LmcacheRig(path, server)
    if "mooncake" in kinds and not mooncake_rig.missing():
        (folder / "mooncake").mkdir()
        cluster = Cluster(folder / "mooncake", NODE_BYTES)
        cluster.start()
        ends.append(cluster.kill)
        rigs["mooncake"] = lambda path: MooncakeRig(path, cluster)
    try:
        yield rigs
    finally:
        for end in ends:
            end()


async def main(kinds: list[str]) -> None:
    """Print the table."""
    print("| backend | write MB/s | read MB/s | one page ms | 64 keys ms |\n| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as name, servers(kinds, Path(name)) as rigs:
        sys.path.insert(0, name)
        for kind, make in rigs.items():
            (Path(name) / "rigs" / kind).mkdir(parents=True)
            sys.path.insert(0, str(Path(name) / "rigs" / kind))
            rig = make(Path(name) / "rigs" / kind)
            try:
                print(await measure(rig), flush=True)
            finally:
                await rig.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:] or [*LOCAL, "lmcache", "mooncake"]))
