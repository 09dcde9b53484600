"""The stack on this machine: four services under a supervisor, and a handle to talk to them."""

import asyncio
import json
import math
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from msgspec.structs import replace

from kvtide import default_model
from kvtide.child import Command, Report, StackError, last_lines
from kvtide.run_folder import GATEWAY_NAME, LOGS_NAME, claimed, end_orphans, record_children, remove_leftovers
from kvtide.status import fetch_status
from kvtide.supervisor import Supervisor
from shared.config import Config, encode_config
from shared.service import CONFIG_VARIABLE

CHECKOUT = Path(__file__).resolve().parent.parent
SERVICES = ("scheduler", "storage", "gpu_worker", "gateway")  # in the order of their start
STOP_ORDER = ("gateway", "scheduler", "gpu_worker", "storage")  # the gateway drains while the others still serve
GRACE_S = {"gateway": 30.0}  # a draining gateway may let running requests end
OTHERS_GRACE_S = 8.0  # a worker ends after the step that it is in, a storage after the file
READY_POLL_S = 0.1  # a local request of 1 ms
STATUS_POLL_S = 0.2  # some acks are files written to a disk
HEALTH_TIMEOUT_S = 2.0  # the gateway answers /health from memory


class Stack:
    """A stack that runs. Made by `running_stack`."""

    def __init__(self, config: Config, supervisor: Supervisor) -> None:
        self.config = config
        self._supervisor = supervisor

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the services that run, by identity such as "gpu_worker-0"."""
        return self._supervisor.pids

    @property
    def url(self) -> str:
        """Where the gateway listens now. Raises StackError while it doesn't."""
        try:
            return str(json.loads((self.config.run_folder / GATEWAY_NAME).read_bytes())["url"])
        except (OSError, ValueError, KeyError):
            raise StackError(f"the gateway has not opened its port yet; {self._log_end('gateway-0')}") from None

    def kill(self, identity: str, number: int) -> None:
        """Send a signal to a service; the supervisor starts it again if it dies."""
        self._supervisor.send(identity, number)

    async def stop(self, identity: str) -> None:
        """End a service for good: the supervisor doesn't start it again."""
        await self._supervisor.children[identity].stop()

    async def watch(self) -> None:
        """Wait until a service can't be kept; raises its StackError."""
        await self._supervisor.watch()

    async def status(self) -> dict[str, Any]:
        """What the scheduler says of itself: docs/operations.md. Raises StackError when it doesn't answer."""
        return await fetch_status(self.config.scheduler_endpoint)

    async def healthy(self) -> bool:
        """Does the gateway say that every part is ready?"""
        try:
            async with httpx.AsyncClient(trust_env=False, timeout=HEALTH_TIMEOUT_S) as client:
                return (await client.get(f"{self.url}/health")).status_code == httpx.codes.OK
        except (httpx.TransportError, StackError):
            return False

    async def wait_idle(self, timeout_s: float) -> dict[str, Any]:
        """Poll the status until nothing runs, waits, is locked or in flight; returns the last one, idle or not."""
        deadline = time.monotonic() + timeout_s
        while True:
            status = await self.status()
            if is_idle(status) or time.monotonic() > deadline:
                return status
            await asyncio.sleep(STATUS_POLL_S)

    async def wait_ready(self, timeout_s: float | None) -> None:
        """Return when every part is ready. Raises StackError when a service fails for good or time is up."""
        deadline = time.monotonic() + (math.inf if timeout_s is None else timeout_s)
        watch = asyncio.create_task(self.watch())
        try:
            while not await self.healthy():
                if time.monotonic() > deadline:
                    tails = "; ".join(self._log_end(identity) for identity in self._supervisor.children)
                    raise StackError(f"the stack is not ready after {timeout_s:g} s; {tails}")
                await asyncio.wait([watch], timeout=READY_POLL_S)
                if watch.done():
                    watch.result()
        finally:
            watch.cancel()

    def _log_end(self, identity: str) -> str:
        log = self.config.run_folder / LOGS_NAME / f"{identity}.log"
        return f"{log} ends with {last_lines(log)[-1]!r}"


def is_idle(status: Mapping[str, Any]) -> bool:
    """Does nothing run, wait, hold a lock or a page?"""
    return unfinished(status) == 0


def unfinished(status: Mapping[str, Any]) -> int:
    """Open requests, locks, and pages in flight or quarantined: what an idle stack has none of."""
    return int(status["requests"]["open"]) + status["locked"] + status["in_flight"] + status["quarantined"]


@asynccontextmanager
async def running_stack(
    config: Config,
    environment: Mapping[str, str] | None = None,
    report: Report = lambda line: None,
    of_role: Callable[[str, Config], Config] = lambda role, config: config,
) -> AsyncIterator[Stack]:
    """Start the four services; on leaving, stop them and leave nothing but logs and page files.

    `environment` is added to this process's own. `of_role` gives a service a configuration of its own. Not ready yet
    when it yields: see `Stack.wait_ready`. Raises StackError when another stack holds the run folder.
    """
    config = await asyncio.to_thread(with_model, config, report)
    folder = config.run_folder
    with claimed(folder):
        for identity in await asyncio.to_thread(end_orphans, folder):
            report(f"{identity} of a supervisor that was killed still ran: killed")
        remove_leftovers(config)
        try:
            async with Supervisor(
                [_command(of_role(role, config), role, environment or {}) for role in SERVICES],
                [f"{role}-0" for role in STOP_ORDER],
                report,
                lambda pids: record_children(folder, pids),
            ) as supervisor:
                yield Stack(config, supervisor)
        finally:
            end_orphans(folder)
            remove_leftovers(config)


@asynccontextmanager
async def more_storages(stack: Stack, numbers: Iterable[int], report: Report) -> AsyncIterator[Supervisor]:
    """Start storages beside a stack's own, as another host would; on leaving, stop them. storage-0 is the stack's."""
    commands = [_command(stack.config, "storage", {}, number) for number in numbers]
    identities = [command.identity for command in commands]
    async with Supervisor(commands, identities, report, lambda pids: None) as supervisor:
        yield supervisor


def with_model(config: Config, report: Report = lambda line: None) -> Config:
    """The configuration with a model's folder and name in it: the default model's, made first if need be."""
    if config.model.path:
        path, name = Path(config.model.path).absolute(), Path(config.model.path).absolute().name
    else:
        path, name = default_model.ensure_default_model(report), default_model.MODEL_NAME
    return replace(config, model=replace(config.model, path=str(path), name=config.model.name or name))


def _command(config: Config, role: str, extra: Mapping[str, str], number: int = 0) -> Command:
    identity = f"{role}-{number}"
    return Command(
        identity=identity,
        argv=(sys.executable, "-m", f"services.{role}", "--identity", identity),
        folder=CHECKOUT,
        log=config.run_folder / LOGS_NAME / f"{identity}.log",
        environment={
            **os.environ,
            # Spinning threads of several processes on few cores make each step up to ten times slower.
            "OMP_WAIT_POLICY": "PASSIVE",
            "PYTHONUNBUFFERED": "1",
            **extra,
            CONFIG_VARIABLE: encode_config(config),
        },
        grace_s=GRACE_S.get(role, OTHERS_GRACE_S),
    )
