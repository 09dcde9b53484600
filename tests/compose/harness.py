"""The stack in containers, under a project of its own, driven as a user drives it: `docker compose` and HTTP."""

import asyncio
import os
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from kvtide.chat_client import Answer, client, complete
from kvtide.stack import unfinished

ROOT = Path(__file__).parent.parent.parent
MODEL = "SmolLM2-135M-Instruct"
VARIABLE = "KV_TEST_COMPOSE"  # set by `make test-compose`
SERVICES = ("gateway", "scheduler", "gpu_worker", "storage")
COMMAND_S = 180.0  # the longest of up, restart, down: a conversion of the model and a cold start
BUILD_S = 1500.0  # torch may have to be downloaded
IDLE_S = 30.0
READY_S = 60.0  # a worker that was killed restarts and reads its model
MAX_TOKENS = 6
KINDS = ("container", "volume", "network")  # what a project consists of

# Pools that are small enough to be full after a few prompts, and float32, in which the oracle is sharp.
SMALL = """  {service}:
    environment:
      KVTIDE_MODEL_DTYPE: float32
      KVTIDE_CACHE_PAGE_SIZE: "16"
      KVTIDE_CACHE_DEVICE_TOKENS: "768"
      KVTIDE_CACHE_HOST_BYTES: "201326592"
      KVTIDE_CACHE_PREFETCH_THRESHOLD: "32"
      KVTIDE_CACHE_PREFETCH_POLICY: wait_complete
"""


def why_not() -> str:
    """Why these tests can't run here; empty when they can."""
    if not os.environ.get(VARIABLE):
        return "containers are tested by `make test-compose`"
    return no_engine()


def no_engine() -> str:
    """Why no container can run here; empty when some can."""
    if shutil.which("docker") is None:
        return "SKIPPED: no docker command on this machine"
    for command, missing in (
        (["docker", "info"], "no Docker engine answers"),
        (["docker", "compose", "version"], "no docker compose v2"),
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        if done.returncode:
            return f"SKIPPED: {missing}: {done.stderr.strip().splitlines()[-1:]}"
    return ""


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Compose:
    """One project. `files`: compose files besides compose.yaml, by path. `profile`: "" = none. `variables`: theirs."""

    def __init__(
        self,
        project: str,
        files: Iterable[Path | str] = (),
        profile: str = "",
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.project = project
        self._variables = variables or {}
        self.port = free_port()
        self._files = [part for file in ("compose.yaml", *files) for part in ("-f", str(file))]
        self._files += ["--profile", profile] if profile else []

    @property
    def url(self) -> str:
        """The gateway's."""
        return f"http://127.0.0.1:{self.port}"

    async def compose(self, *arguments: str, timeout_s: float = COMMAND_S) -> str:
        """Run `docker compose ARGUMENTS`; returns its stdout. Fails with what it said."""
        return await run(
            "docker",
            "compose",
            *self._files,
            "-p",
            self.project,
            *arguments,
            timeout_s=timeout_s,
            **{"KV_PORT": str(self.port), **self._variables},
        )

    async def up(self, *arguments: str) -> None:
        """Start what doesn't run and return when all of it is healthy."""
        try:
            await self.compose("up", "--wait", "--wait-timeout", str(int(COMMAND_S) - 10), *arguments)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{await self.logs()}") from None

    async def restart(self, *services: str) -> None:
        """Restart services and wait until the gateway says that every part is ready again."""
        await self.compose("restart", *services)
        await self.up("--no-recreate")
        await self.wait_ready()

    async def wait_ready(self) -> None:
        """Docker calls a gateway healthy until some checks have failed; this asks the gateway itself."""
        async with asyncio.timeout(READY_S), httpx.AsyncClient(trust_env=False) as http:
            while (await http.get(f"{self.url}/health")).status_code != httpx.codes.OK:  # noqa: ASYNC110
                await asyncio.sleep(0.2)

    async def logs(self) -> str:
        """The last lines of each container."""
        return await self.compose("logs", "--no-color", "--tail", "8")

    async def ask(self, text: str, **options: Any) -> Answer:
        """One greedy completion."""
        async with client(self.url) as http:
            return await complete(http, MODEL, text, **{"max_tokens": MAX_TOKENS, **options})

    async def status(self) -> dict[str, Any]:
        """The scheduler's status, through the gateway."""
        async with httpx.AsyncClient(trust_env=False) as http:
            body: dict[str, Any] = (await http.get(f"{self.url}/status")).raise_for_status().json()
            return body

    async def settle(self) -> dict[str, Any]:
        """Wait until nothing runs, waits or is in flight: what was asked is in all tiers by then."""
        async with asyncio.timeout(IDLE_S):
            while unfinished(status := await self.status()):  # noqa: ASYNC110 - asked over HTTP
                await asyncio.sleep(0.2)
        assert status["integrity"] == "ok", status
        return status

    async def left(self) -> list[str]:
        """Containers, volumes and networks of the project that exist."""
        found = []
        for kind in KINDS:
            listed = await run(
                "docker",
                kind,
                "ls",
                "-q",
                *(["-a"] if kind == "container" else []),
                "--filter",
                f"label=com.docker.compose.project={self.project}",
            )
            found += [f"{kind} {each}" for each in listed.split()]
        return found


async def run(*command: str, timeout_s: float = COMMAND_S, **environment: str) -> str:
    """Run a command in the checkout; returns its stdout. Fails with what it said, or after `timeout_s`."""
    process = await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), timeout_s)
    except TimeoutError:
        raise AssertionError(f"{' '.join(command)} took longer than {timeout_s:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, f"{' '.join(command)} failed with {process.returncode}:\n{err.decode()[-3000:]}"
    return out.decode()


async def build() -> None:
    """Make the image of this checkout."""
    await Compose("kvtide-build").compose("build", timeout_s=BUILD_S)


@asynccontextmanager
async def running(
    name: str, folder: Path, *files: str, profile: str = "", variables: Mapping[str, str] | None = None
) -> AsyncIterator[Compose]:
    """A project with small pools, up and healthy; whatever happens, nothing of it is left.

    folder: for one more compose file. files, variables: see `Compose`. profile: a store that L3 is kept in; then its
    storages run in place of those with files.
    """
    services = [f"storage_{profile}" if profile and service == "storage" else service for service in SERVICES]
    small = folder / f"{name}.yaml"
    text = "services:\n" + "".join(SMALL.format(service=service) for service in services)
    small.write_text(text + ("  storage:\n    scale: 0\n" if profile else ""))
    compose = Compose(f"kvtide-test-{name}-{os.getpid()}", [*files, small], profile, variables)
    try:
        if profile:
            await compose.compose("build", timeout_s=BUILD_S)
        await compose.up()
        yield compose
    finally:
        await compose.compose("down", "-v", "--timeout", "15")
    assert await compose.left() == []
