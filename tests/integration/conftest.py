"""Fixtures with real processes. The loop of the session keeps the supervisors running while tests of it run."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from kvtide.default_model import ensure_default_model
from kvtide.oracle_process import Oracle, running_oracle
from kvtide.private_folder import private_folder
from kvtide.stack import Stack, running_stack
from tests.integration.harness import READY_TIMEOUT_S, small_config


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def oracle() -> AsyncIterator[Oracle]:
    """One loaded model for all tests."""
    async with running_oracle(ensure_default_model()) as running:
        yield running


@pytest.fixture(scope="module")
def module_folder() -> Iterator[Path]:
    """A folder with a short path, as sockets need it, for the stacks of one module."""
    with private_folder("kvtide-test-") as folder:
        yield folder


@pytest.fixture
def folder() -> Iterator[Path]:
    """The same for one test."""
    with private_folder("kvtide-test-") as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stack(module_folder: Path) -> AsyncIterator[Stack]:
    """A small stack for the tests of a module that leave it as they found it."""
    async with running_stack(small_config(module_folder)) as running:
        await running.wait_ready(READY_TIMEOUT_S)
        yield running
