"""An LMCache server for a benchmark: in memory, without files, in the environment that `make lmcache` makes."""

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from shared.errors import KvtideError

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-lmcache" / "bin" / "python"
START_S = 90.0  # it takes 2 to 12 s to import on an idle machine
END_S = 5.0


def installed() -> bool:
    """Is LMCache there?"""
    return PYTHON.exists()


@contextlib.contextmanager
def lmcache_server(folder: Path, memory_gb: float) -> Iterator[int]:
    """The port of a server that ends with the block; it writes its log into `folder`. Raises KvtideError."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [str(PYTHON), "-m", "services.storage.lmcache_server", "--port", str(port), "--memory-gb", str(memory_gb)]
    log = folder / "lmcache.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=output, stderr=output
        )
    try:
        deadline_s = time.monotonic() + START_S
        while not _listens(port):
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise KvtideError(f"LMCache's server isn't ready: {log.read_text(errors='replace')[-1000:]}")
            time.sleep(0.1)
        yield port
    finally:
        process.kill()
        process.wait(END_S)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
