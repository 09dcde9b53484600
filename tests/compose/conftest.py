"""Fixtures of the container tests: minutes and an engine, so `make test-compose` runs them and `make test` doesn't."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from kvtide.default_model import ensure_default_model
from kvtide.oracle_process import Oracle, running_oracle
from tests.compose.harness import Compose, build, running, why_not


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
    await build()


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
