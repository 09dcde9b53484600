"""The stack in containers, small pools, its links through proxies or not."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from kvtide.child import StackError
from kvtide.private_folder import private_folder
from tests.compose.harness import MODEL, SERVICES, Compose, free_port, run, running
from tests.faults import links_service
from tests.faults.matrix.target import Target

KILL = "kill -9 $(pidof python)"  # `docker kill` counts as a stop by hand: Docker wouldn't start the container again
OVERRIDES = ("tests/compose/faults.yaml",)
LINK_OVERRIDES = ("compose.remote.yaml", *OVERRIDES, "tests/compose/links.yaml")
HOOKS_MODE = 0o777  # the services are another user than who runs the tests; the folder around it is closed
HTTP_TIMEOUT_S = 3.0  # a gateway waits 2 s for its scheduler


class Containers(Target):
    """A compose project that runs. `links_port`: of the proxies' control; 0 = there are none."""

    def __init__(self, compose: Compose, hooks: Path, containers: Mapping[str, str], links_port: int = 0) -> None:
        self.hooks = hooks
        self.model = MODEL
        self._compose = compose
        self._containers = containers  # their ids, by service
        self._links_port = links_port

    @property
    def url(self) -> str:
        """The published port."""
        return self._compose.url

    def identity(self, service: str) -> str:
        """A storage counts replicas from 1 (deploy/start-storage.sh)."""
        return f"{service}-{1 if service == 'storage' else 0}"

    async def status(self) -> dict[str, Any]:
        """Through the gateway."""
        try:
            async with httpx.AsyncClient(trust_env=False, timeout=HTTP_TIMEOUT_S) as http:
                body: dict[str, Any] = (await http.get(f"{self.url}/status")).raise_for_status().json()
                return body
        except httpx.HTTPError as error:
            raise StackError(f"no status from {self.url}: {error!r}") from None

    async def healthy(self) -> bool:
        """From the gateway."""
        try:
            async with httpx.AsyncClient(trust_env=False, timeout=HTTP_TIMEOUT_S) as http:
                return (await http.get(f"{self.url}/health")).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    async def settle(self) -> None:
        """Of the container tests."""
        await self._compose.settle()

    async def kill(self, service: str) -> None:
        """A crash inside, after which Docker starts the container again."""
        with contextlib.suppress(AssertionError):  # the command dies with its container
            await self._docker("exec", service, "sh", "-c", KILL)

    async def restart(self, service: str) -> None:
        """What `docker compose restart` does."""
        await self._docker("restart", service)

    async def pause(self, service: str) -> None:
        """The kernel's freezer."""
        await self._docker("pause", service)

    async def resume(self, service: str) -> None:
        """Thaws it."""
        await self._docker("unpause", service)

    async def disturb(self, link: str, fault: str, seconds: float) -> int:
        """In the container of the proxies."""
        return await links_service.order("127.0.0.1", self._links_port, link, fault, seconds)

    async def keep_logs(self, folder: Path) -> None:
        """What Docker has kept."""
        for service in self._containers:
            text = await self._compose.compose("logs", "--no-color", "--no-log-prefix", "--timestamps", service)
            await asyncio.to_thread((folder / f"{service}.log").write_text, text)

    async def _docker(self, verb: str, service: str, *arguments: str) -> None:
        await run("docker", verb, self._containers[service], *arguments)  # faster than compose, which reads its files


@asynccontextmanager
async def containers(links: bool) -> AsyncIterator[Target]:
    """A new stack, ready. links: each through a proxy, and the worker gets host pages over one; else it maps them."""
    with private_folder("kvtide-faults-") as folder:
        hooks = folder / "hooks"
        hooks.mkdir()
        hooks.chmod(HOOKS_MODE)
        port = free_port() if links else 0
        variables = {"KV_HOOKS": str(hooks)}
        if links:
            variables |= {"KV_LINKS_PORT": str(port), "KV_LINKS_USER": f"{os.getuid()}:{os.getgid()}"}
        files = LINK_OVERRIDES if links else OVERRIDES
        async with running("links" if links else "faults", folder, *files, variables=variables) as compose:
            await compose.wait_ready()
            names = [*SERVICES, "links"] if links else SERVICES
            ids = {name: (await compose.compose("ps", "-q", name)).strip() for name in names}
            yield Containers(compose, hooks, ids, port)
