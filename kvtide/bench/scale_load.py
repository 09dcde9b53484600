"""Returning sessions for `kvtide bench scale`: each comes back with its whole text and some more, then ends."""

import asyncio
import random
import time
from typing import NamedTuple

import httpx

from kvtide.chat_client import RequestError, complete

SESSIONS = 48  # open at a time; one that ends is followed by a new one, so that the live tokens stay as many
TURNS = 8
OPENING, QUESTION, ANSWER = 96, 32, 4  # tokens: what a session begins with, and what each turn adds
CLIENTS = 3  # requests at a time
TOKENS = (1000, 40000)  # ordinary tokens of any model with a large vocabulary
LIVE_TOKENS = SESSIONS * (OPENING + (QUESTION + ANSWER) * TURNS // 2)


class Asked(NamedTuple):
    """An answered request: tokens of its prompt."""

    at_s: float  # when it was answered, on time.monotonic's clock
    prompt: int
    device: int
    host: int
    storage: int


class Load:
    """Asks until it is cancelled. The same seed makes the same prompts."""

    def __init__(self, http: httpx.AsyncClient, model: str, seed: int) -> None:
        self.answered: list[Asked] = []
        self.errors: list[str] = []
        self.warmed_up = asyncio.Event()  # each session has been asked twice or so
        self._http = http
        self._model = model
        self._chance = random.Random(seed)
        self._resting = [[self._new(turn) for _ in range(SESSIONS // TURNS)] for turn in range(TURNS)]  # by turn
        self._asked = 0

    async def run(self) -> None:
        """Keep CLIENTS requests open."""
        async with asyncio.TaskGroup() as clients:
            for _ in range(CLIENTS):
                clients.create_task(self._ask_again())

    async def _ask_again(self) -> None:
        while True:
            # Every turn as often as every other, in any short time: else chance would move the hit rate by more than
            # a change does.
            turn = self._asked % TURNS
            self._asked += 1
            before = self._resting[turn].pop(self._chance.randrange(len(self._resting[turn])))
            text = [*before, *self._tokens(QUESTION)]
            tokens = await self._ask(text) or self._tokens(ANSWER)
            following = (turn + 1) % TURNS
            self._resting[following].append(text + tokens if following else self._new(0))
            if len(self.answered) == 2 * SESSIONS:
                self.warmed_up.set()

    async def _ask(self, text: list[int]) -> list[int]:
        try:
            answer = await complete(self._http, self._model, text, max_tokens=ANSWER, ignore_eos=True)
        except RequestError as error:
            self.errors.append(str(error))
            return []
        hits = answer.device_tokens, answer.host_tokens, answer.storage_tokens
        self.answered.append(Asked(time.monotonic(), answer.prompt_tokens, *hits))
        return answer.tokens

    def _new(self, turn: int) -> list[int]:
        return self._tokens(OPENING + turn * (QUESTION + ANSWER))

    def _tokens(self, count: int) -> list[int]:
        return [self._chance.randint(*TOKENS) for _ in range(count)]
