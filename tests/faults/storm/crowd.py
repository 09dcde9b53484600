"""Random traffic whose every token is checked as it goes on: families of prompts, some clients go away."""

import asyncio
import random
import time

from kvtide.chat_client import RequestError
from kvtide.oracle import Emitted
from kvtide.oracle_process import Oracle
from tests.faults.matrix.requests import Asked
from tests.faults.matrix.target import Target

FAMILIES = 40  # prompts that come again, each time with another end; number n with a weight of 1 / n
SHORTEST, LONGEST = 48, 240  # tokens of a family's common part
LONGEST_END = 64  # tokens of a prompt's own end
SHORTEST_ANSWER, LONGEST_ANSWER = 2, 20  # tokens
CLIENTS = 5
ABORTS = 0.15  # share of clients that go away
LATEST_ABORT_S = 4.0
ATTEMPT_S = 120.0  # of an attempt: the stack ends it after 60 s, a pause of the gateway may last 25 s
CALM_S = 120.0  # after the storm, in which every request is answered; in it, faults may break one again and again
UNCHECKED = 64  # answers that may wait for the oracle; then the clients wait for it
TOKENS = (1000, 40000)  # ordinary tokens of any model with a large vocabulary


class Crowd:
    """The requests and how they ended. The same seed makes the same prompts."""

    def __init__(self, target: Target, oracle: Oracle, seed: int) -> None:
        self.answered = self.retried = self.aborted = 0
        self.hung = 0  # attempts that nobody ended in time
        self.checked = self.wrong = 0  # tokens
        self.refused: list[str] = []  # errors that another try doesn't mend
        self._target = target
        self._oracle = oracle
        self._chance = random.Random(seed)
        self._weights = [1.0 / (place + 1) for place in range(FAMILIES)]
        self._families = [self._tokens(self._chance.randint(SHORTEST, LONGEST)) for _ in range(FAMILIES)]
        self._unchecked: asyncio.Queue[list[Emitted] | None] = asyncio.Queue(UNCHECKED)

    async def run(self, seconds: float) -> None:
        """Keep CLIENTS requests open for so long; returns when all are answered and checked."""
        end_s = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            group.create_task(self._check())
            clients = [group.create_task(self._ask_until(end_s)) for _ in range(CLIENTS)]
            await asyncio.wait(clients)
            await self._unchecked.put(None)

    async def _ask_until(self, end_s: float) -> None:
        while time.monotonic() < end_s:
            chance = self._chance
            prompt = [*chance.choices(self._families, self._weights)[0], *self._tokens(chance.randint(0, LONGEST_END))]
            limit_s = end_s - time.monotonic() + CALM_S
            asked = Asked(self._target, prompt, chance.randint(SHORTEST_ANSWER, LONGEST_ANSWER), limit_s)
            leaves_s = chance.uniform(0.0, LATEST_ABORT_S) if chance.random() < ABORTS else None
            try:
                await self._end(asked, leaves_s)
            finally:
                await asked.cancel()
                self._note_hang(asked)
            await self._unchecked.put(asked.emitted)

    async def _end(self, asked: Asked, leaves_s: float | None) -> None:
        try:
            await asyncio.wait_for(asyncio.shield(asked.answered()), leaves_s)
            self.answered += 1
            self.retried += bool(asked.errors)
        except RequestError as error:
            self.refused.append(str(error))
        except TimeoutError:
            if leaves_s is not None and not asked.ended:
                self.aborted += 1
            else:
                self.refused.append(f"no answer {CALM_S:g} s after the storm: {asked.errors[-3:]}")

    def _note_hang(self, asked: Asked) -> None:
        if asked.longest_s > ATTEMPT_S:
            self.hung += 1
            self.refused.append(f"an attempt lasted {asked.longest_s:.0f} s: {asked.errors[-3:]}")

    async def _check(self) -> None:
        while (emitted := await self._unchecked.get()) is not None:
            verdict = await self._oracle.check(emitted)
            self.checked += verdict.checked
            self.wrong += verdict.wrong

    def _tokens(self, count: int) -> list[int]:
        return [self._chance.randint(*TOKENS) for _ in range(count)]
