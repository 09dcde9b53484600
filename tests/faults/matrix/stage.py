"""A running stack, and requests that are in the middle of what a cell says when its fault comes.

A hook (shared/test_hooks.py) holds the process at the place for HOLD_S; that its file goes says that it is there.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from kvtide.child import StackError
from kvtide.demo.plan import documents
from kvtide.stack import is_idle
from services.storage.test_hooks import READ
from shared import test_hooks
from tests.faults.matrix.cells import SERVICES
from tests.faults.matrix.requests import Asked
from tests.faults.matrix.target import Target
from tests.integration.harness import PROMPT_CHARS

HOLD_S = 1.5  # a fault comes within 0.1 s, in containers within 0.3 s
RECOVERY_S = 60.0  # from a fault's end until nothing is left of it; the promise is 30 s on an idle machine
POLL_S = 0.1
REACH_S = 20.0  # until a request is where it is to be held; on a busy machine a prompt takes seconds
MAX_TOKENS = 8
LONG_TOKENS = 24  # of an answer that is hit while it is decoded
EVICTORS = 4  # prompts that together are more than the device pool holds
STORED = 24  # prompts that only L3 has; a cell that prefetches uses one up
PLACES = {"prefilling": "worker_step", "loading back": "worker_load", "writing back": "worker_write"}


class Stage:
    """What a cell's requests need. One cell at a time."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.requests: list[Asked] = []  # of the cell
        self._numbers = itertools.count()
        self._evictors = [self.fresh() for _ in range(EVICTORS)]
        self._stored: list[str] = []

    def fresh(self) -> str:
        """A prompt of about 200 tokens whose first page no other has."""
        number = next(self._numbers)
        return f"Text {number}. {documents()[number % len(documents())].text[:PROMPT_CHARS]}"

    def ask(self, text: str, max_tokens: int = MAX_TOKENS) -> Asked:
        """Begin a request of the cell."""
        self.requests.append(Asked(self.target, text, max_tokens))
        return self.requests[-1]

    async def store(self) -> None:
        """Make STORED prompts that are in L3 and nowhere else."""
        self._stored = [self.fresh() for _ in range(STORED)]
        for text in self._stored:
            await self._prepare(text)
        storage = self.target.identity("storage")
        before = epochs(await self.target.status())[storage]
        await self.target.kill("storage")
        await rest(self.target, time.monotonic() + RECOVERY_S, lambda now: now[storage] != before)
        await self._evict()

    def stored(self) -> str:
        """A prompt that only L3 has."""
        return self._stored.pop()

    async def on_host(self) -> str:
        """A prompt that the host pool has and the device has not."""
        text = self.fresh()
        await self._prepare(text)
        await self._evict()
        return text

    async def begin(self, activity: str) -> None:
        """Bring requests into the middle of an activity; another one comes behind them."""
        if activity == "idle":
            return
        if activity == "decoding":
            decoding = self.ask(self.fresh(), LONG_TOKENS)
            await _until(lambda: decoding.tokens > 0, "an answer's first token")
            await self._held("worker_step")
        elif activity == "prefetching":
            text = self.stored()
            self.arm(READ)
            self.ask(text)
            await self._reached(READ)
        else:
            text = await self.on_host() if activity == "loading back" else self.fresh()
            self.arm(PLACES[activity])
            self.ask(text)
            await self._reached(PLACES[activity])
        self.ask(self.fresh())

    def arm(self, place: str) -> None:
        """Hold the process that comes there next."""
        test_hooks.arm(self.target.hooks, place, f"sleep {HOLD_S}")

    async def end(self) -> list[Asked]:
        """Wait until the cell's requests are answered. Returns them, and forgets them."""
        try:
            if not self.requests:
                self.ask(self.fresh())
            for asked in self.requests:
                await asked.answered()
            return self.requests
        finally:
            for asked in self.requests:
                await asked.cancel()
            self.requests = []
            for hook in self.target.hooks.iterdir():
                hook.unlink(missing_ok=True)

    async def stats(self) -> dict[str, Any]:
        """What the storage says of itself."""
        status = await self.target.status()
        return next(peer["stats"] for peer in status["peers"] if peer["role"] == "storage")

    async def _held(self, place: str) -> None:
        self.arm(place)
        await self._reached(place)

    async def _reached(self, place: str) -> None:
        await _until(lambda: not (self.target.hooks / place).exists(), f"the hook {place}")

    async def _prepare(self, text: str) -> None:
        await Asked(self.target, text, 1).answered()
        await self.target.settle()

    async def _evict(self) -> None:
        for text in self._evictors:
            await Asked(self.target, text, 1).answered()
        await self.target.settle()


async def _until(condition: Any, what: str) -> None:
    deadline = time.monotonic() + REACH_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} was not reached within {REACH_S:g} s")
        await asyncio.sleep(0.01)


@asynccontextmanager
async def counting(stage: Stage, *names: str) -> AsyncIterator[None]:
    """Fails unless one of these counters of the storage has grown at the end: the fault was met."""
    before = await stage.stats()
    yield
    deadline = time.monotonic() + REACH_S
    while all(after.get(name, 0) <= before.get(name, 0) for after in [await stage.stats()] for name in names):
        assert time.monotonic() < deadline, f"the fault was never met: none of {', '.join(names)} has grown"
        await asyncio.sleep(0.2)


def epochs(status: dict[str, Any]) -> dict[str, int]:
    """Of each service that is heard, by identity."""
    heard = {peer["identity"]: peer["epoch"] for peer in status["peers"] if peer["up"]}
    return heard | {"scheduler-0": status["scheduler"]["epoch"]}


def at_rest(target: Target, status: dict[str, Any]) -> bool:
    """Ready and idle, and every service is heard."""
    heard = epochs(status).keys()
    return bool(status["ready"]) and is_idle(status) and heard >= {target.identity(service) for service in SERVICES}


async def rest(target: Target, deadline: float, as_wanted: Callable[[dict[str, int]], bool] = lambda now: True) -> None:
    """Wait until nothing is left of a fault and every service is heard; `as_wanted` looks at their epochs."""
    status: dict[str, Any] = {}
    while not (status and at_rest(target, status) and as_wanted(epochs(status)) and await target.healthy()):
        assert time.monotonic() < deadline, f"not recovered after {RECOVERY_S:g} s: {status}"
        await asyncio.sleep(POLL_S)
        with contextlib.suppress(StackError):  # the scheduler, or what stands before it, is just being started again
            status = await target.status()
    assert status["integrity"] == "ok", status["integrity"]
