"""A real Mooncake Store: a master and a node that lends memory. Only in a network namespace that has nothing but `lo`.

Its data port listens on every interface: `make test-backends` runs the suite in such a namespace.
"""

import importlib.util
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from services.storage.breaker import BreakerBackend
from services.storage.mooncake_store import INSTALL
from tests.backends.rigs import Rig
from tests.backends.servers import Server, free_port

NODE_BYTES = 128 * 2**20


def missing() -> str:
    """Why it can't run here; empty = it can."""
    if importlib.util.find_spec("mooncake") is None:
        return "Mooncake's servers: only in `make test-backends`, which installs them"
    if [name for _, name in socket.if_nameindex()] != ["lo"]:
        return "Mooncake listens on every interface: only in a namespace with nothing but lo, `make test-backends`"
    return ""


class Cluster:
    """The master and its node."""

    def __init__(self, folder: Path, node_bytes: int = NODE_BYTES) -> None:
        spec = importlib.util.find_spec("mooncake")
        assert spec is not None
        assert spec.submodule_search_locations
        program = Path(spec.submodule_search_locations[0]) / "mooncake_master"
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        flags = {
            "rpc_address": "127.0.0.1",
            "rpc_port": self.port,
            "metrics_host": "127.0.0.1",
            "metrics_port": free_port(),
            "client_ttl": 3,
            "default_kv_lease_ttl": 1000,  # a get that takes longer fails, as on a busy machine with 100
            "logtostderr": "true",
        }
        self._folder = folder
        self._node_bytes = node_bytes
        self.master = Server([str(program), *(f"-{k}={v}" for k, v in flags.items())], self.port, folder, {})
        node = [sys.executable, "-m", "services.storage.mooncake_node"]
        arguments = ["--master", self.address, "--bytes", str(node_bytes)]
        self.node = Server([*node, *arguments], 0, folder, dict(os.environ))

    def start(self) -> None:
        """Bring both up. Raises RuntimeError with their last words and the remedy for a library that is missing."""
        try:
            self.master.start()
            self.node.start_and_wait_for("node_ready")
        except RuntimeError as error:
            self.master.kill()
            raise RuntimeError(f"{error}\nDoes it lack a library? {INSTALL}") from None

    def kill(self) -> None:
        """kill -9 both."""
        self.node.kill()
        self.master.kill()


class MooncakeRig(Rig):
    kind = "mooncake"
    quota_is_its_own = False
    survives = False  # a master that restarts has forgotten every page
    timeout_s = 4.0

    def __init__(self, folder: Path, cluster: Cluster) -> None:
        super().__init__(folder)
        self.cluster = cluster

    async def open(self) -> None:
        await (await self.make()).clear()

    def overrides(self, quota: int) -> list[str]:
        return ["storage.backend=mooncake", f"storage.address={self.cluster.address}"]

    @asynccontextmanager
    async def lost(self, backend: BreakerBackend) -> AsyncIterator[None]:
        self.cluster.kill()
        try:
            yield
        finally:
            self.cluster.start()

    @asynccontextmanager
    async def stalled(self, backend: BreakerBackend) -> AsyncIterator[None]:
        with self.cluster.master.paused():
            yield
