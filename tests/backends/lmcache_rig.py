"""A real LMCache server, one for the whole session: it takes seconds to start."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from services.storage.breaker import BreakerBackend
from tests.backends.rigs import FULL, Rig
from tests.backends.servers import Server, free_port

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-lmcache" / "bin" / "python"
MISSING = "" if FULL and PYTHON.exists() else "LMCache's server: only in `make test-backends`, which installs it"


def lmcache_server(folder: Path, memory_gb: float = 0.25, *, files: bool = True) -> Server:
    """A server that isn't started yet."""
    port = free_port()
    command = [str(PYTHON), "-m", "services.storage.lmcache_server", "--port", str(port)]
    command += ["--memory-gb", str(memory_gb)]
    if files:
        command += ["--folder", str(folder / "pages"), "--disk-gb", "1"]
    return Server(command, port, folder, {"PYTHONPATH": str(ROOT)})


class LmcacheRig(Rig):
    kind = "lmcache"
    quota_is_its_own = False
    timeout_s = 4.0  # while it writes to its files an answer may take seconds
    survives = False  # what it hadn't written to its files yet is lost

    def __init__(self, folder: Path, server: Server) -> None:
        super().__init__(folder)
        self.server = server

    async def open(self) -> None:
        await (await self.make()).clear()

    def overrides(self, quota: int) -> list[str]:
        return ["storage.backend=lmcache", f"storage.address=127.0.0.1:{self.server.port}"]

    @asynccontextmanager
    async def lost(self, backend: BreakerBackend) -> AsyncIterator[None]:
        self.server.kill()
        try:
            yield
        finally:
            self.server.start()

    @asynccontextmanager
    async def stalled(self, backend: BreakerBackend) -> AsyncIterator[None]:
        with self.server.paused():
            yield
