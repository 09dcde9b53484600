"""Traffic that a fault may break: who was answered, who was told to try again, and every token that came."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from kvtide.chat_client import Answer, RequestError, client, complete
from kvtide.oracle import Emitted
from kvtide.stack import Stack
from tests.integration.harness import prompt

REQUESTS = 8  # on PROMPTS prompts: more than the device pool of the small stack holds at once
PROMPTS = 4
MAX_TOKENS = 16
END_S = 90.0  # a request that a fault hits waits for a restart, some 10 s, and for the others


class Traffic:
    """Requests under way."""

    def __init__(self, stack: Stack, numbers: Sequence[int]) -> None:
        self._stack = stack
        self._answers = [Answer() for _ in numbers]
        pairs = zip(numbers, self._answers, strict=True)
        self._tasks = [asyncio.create_task(self._ask(number, answer)) for number, answer in pairs]

    async def wait_for_tokens(self) -> None:
        """Until some request has tokens and some other is still to end: the middle of the traffic."""
        async with asyncio.timeout(END_S):
            while not any(answer.tokens for answer in self._answers):
                assert not all(task.done() for task in self._tasks), "the traffic ended before its middle"
                await asyncio.sleep(0.02)

    async def end(self) -> list[str]:
        """Wait for all requests. Returns "answered" or the error's text for each; raises one that isn't retryable."""
        async with asyncio.timeout(END_S):
            return await asyncio.gather(*self._tasks)

    @property
    def emitted(self) -> list[Emitted]:
        """Every token that reached a client, those of broken answers too."""
        return [answer.emitted for answer in self._answers if answer.tokens]

    def cancel(self) -> None:
        """Close what is open."""
        for task in self._tasks:
            task.cancel()

    async def _ask(self, number: int, answer: Answer) -> str:
        async with client(self._stack.url) as http:
            try:
                model = self._stack.config.model.name
                await complete(http, model, prompt(number), answer, max_tokens=MAX_TOKENS, ignore_eos=True)
            except RequestError as error:
                if not error.retryable:
                    raise
                return str(error)
        return "answered"


@asynccontextmanager
async def traffic(stack: Stack, first: int) -> AsyncIterator[Traffic]:
    """REQUESTS requests for PROMPTS prompts from `first` on, so that some share pages."""
    numbers = [first + place % PROMPTS for place in range(REQUESTS)]
    running = Traffic(stack, numbers)
    try:
        yield running
    finally:
        running.cancel()
