"""Fixtures of the container tests: minutes and an engine, so `make test-compose` runs them and `make test` doesn't."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from kvtide.default_model import ensure_default_model
from kvtide.oracle_process import Oracle, running_oracle
from tests.compose.harness import BUILD_S, SERVICES, Compose, why_not

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


@pytest.fixture(scope="session")
def engine() -> None:
    """Skips, with the reason, where containers can't run."""
    if reason := why_not():
        pytest.skip(reason)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def oracle(engine: None) -> AsyncIterator[Oracle]:
    """The default model on this machine: the same weights as in the containers."""
    async with running_oracle(ensure_default_model()) as running:
        yield running


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def image(engine: None) -> None:
    """The image of this checkout."""
    await Compose("kvtide-build").compose("build", timeout_s=BUILD_S)


@asynccontextmanager
async def running(name: str, folder: Path, *files: str, profile: str = "") -> AsyncIterator[Compose]:
    """A project with small pools, up and healthy; whatever happens, nothing of it is left.

    profile: a store that L3 is kept in; its storages then run in place of those with files.
    """
    services = [f"storage_{profile}" if profile and service == "storage" else service for service in SERVICES]
    small = folder / f"{name}.yaml"
    text = "services:\n" + "".join(SMALL.format(service=service) for service in services)
    small.write_text(text + ("  storage:\n    scale: 0\n" if profile else ""))
    compose = Compose(f"kvtide-test-{name}-{os.getpid()}", [*files, small], profile)
    try:
        if profile:
            await compose.compose("build", timeout_s=BUILD_S)
        await compose.up()
        yield compose
    finally:
        await compose.compose("down", "-v", "--timeout", "15")
    assert await compose.left() == []


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def mapped(image: None, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Compose]:
    """The stack as compose.yaml has it."""
    async with running("mapped", tmp_path_factory.mktemp("compose")) as compose:
        yield compose


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def remote(image: None, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Compose]:
    """The stack without a shared volume."""
    async with running("remote", tmp_path_factory.mktemp("compose"), "compose.remote.yaml") as compose:
        yield compose


@pytest_asyncio.fixture(loop_scope="session")
async def store(
    request: pytest.FixtureRequest, image: None, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Compose]:
    """The stack with the profile that the test's parameter names."""
    async with running(request.param, tmp_path_factory.mktemp("compose"), profile=request.param) as compose:
        yield compose
