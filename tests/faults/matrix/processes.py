"""The stack on processes of this machine, small pools, its links through proxies or not."""

import asyncio
import shutil
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from kvtide.private_folder import private_folder
from kvtide.run_folder import LOGS_NAME
from kvtide.stack import Stack, running_stack
from shared.config import Config
from tests.faults.matrix.links import disturb
from tests.faults.matrix.target import Target
from tests.faults.proxied import OfRole, proxied
from tests.faults.proxy import TcpProxy
from tests.integration.harness import READY_TIMEOUT_S, settle, small_config

REQUEST_TIMEOUT_S = 60.0  # the stack's


class Processes(Target):
    """A running `kvtide.stack.Stack`. `proxies`: by link, those that there are."""

    def __init__(self, stack: Stack, hooks: Path, proxies: Mapping[str, TcpProxy] | None = None) -> None:
        self.hooks = hooks
        self.model = stack.config.model.name
        self._stack = stack
        self._proxies = proxies or {}

    @property
    def url(self) -> str:
        """Where the gateway listens now: another port after each start."""
        return self._stack.url

    def identity(self, service: str) -> str:
        """There is one of each."""
        return f"{service}-0"

    async def status(self) -> dict[str, Any]:
        """From the scheduler itself."""
        return await self._stack.status()

    async def healthy(self) -> bool:
        """From the gateway."""
        return await self._stack.healthy()

    async def settle(self) -> None:
        """Of the integration tests."""
        await settle(self._stack)

    async def kill(self, service: str) -> None:
        """The supervisor starts it again."""
        self._stack.kill(self.identity(service), signal.SIGKILL)

    async def restart(self, service: str) -> None:
        """The supervisor starts it again."""
        self._stack.kill(self.identity(service), signal.SIGTERM)

    async def pause(self, service: str) -> None:
        """SIGSTOP."""
        self._stack.kill(self.identity(service), signal.SIGSTOP)

    async def resume(self, service: str) -> None:
        """SIGCONT."""
        self._stack.kill(self.identity(service), signal.SIGCONT)

    async def disturb(self, link: str, fault: str, seconds: float) -> int:
        """In this process."""
        return await disturb(self._proxies[link], link, fault, seconds)

    async def keep_logs(self, folder: Path) -> None:
        """Copies."""
        await asyncio.to_thread(shutil.copytree, self._stack.config.run_folder / LOGS_NAME, folder, dirs_exist_ok=True)


@asynccontextmanager
async def processes(links: bool) -> AsyncIterator[Target]:
    """A new stack, ready. links: each through a proxy, and the worker gets host pages over one; else it maps them."""
    with private_folder("kvtide-faults-") as folder:
        hooks = folder / "hooks"
        hooks.mkdir()
        config, proxies = _config(folder), dict[str, TcpProxy]()
        of_role: OfRole = _same
        async with AsyncExitStack() as entered:
            if links:
                config, of_role, proxies = await entered.enter_async_context(proxied(config, remote=True))
            environment = {"KVTIDE_TEST_HOOKS": str(hooks)}
            stack = await entered.enter_async_context(running_stack(config, environment, of_role=of_role))
            await stack.wait_ready(READY_TIMEOUT_S)
            yield Processes(stack, hooks, proxies)


def _same(role: str, config: Config) -> Config:
    return config


def _config(folder: Path) -> Config:
    config = small_config(folder)
    return replace(config, scheduler=replace(config.scheduler, request_timeout_s=REQUEST_TIMEOUT_S))
