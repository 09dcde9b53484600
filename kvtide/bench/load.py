"""The soak's load: clients that ask for prompts of many lengths, streamed or not, and sometimes go away."""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx
import msgspec

FAMILIES = 48  # prompts that come again, each time with another end; number n with a weight of 1 / n
SHORTEST, LONGEST = 64, 320  # tokens of a family's common part
LONGEST_END = 96  # tokens of a prompt's own end
SHORTEST_ANSWER, LONGEST_ANSWER = 4, 24  # tokens
CLIENTS = 6  # at once
ABORTS = 0.2  # share of requests whose client goes away
LATEST_ABORT_S = 3.0  # covers waiting, prefill and decode
STREAMS = 0.5  # share of requests that are streamed
TOKENS = (1000, 40000)  # ordinary tokens of any model with a large vocabulary
HUNG_S = 60.0  # a request that is still open so long after the load's end never ends


@dataclass
class Load:
    """The requests and how they ended. The same seed makes the same prompts."""

    seed: int
    requests: int = 0
    aborted: int = 0
    hung: int = 0
    errors: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._weights = [1.0 / (place + 1) for place in range(FAMILIES)]
        self._families = [self._tokens(self._random.randint(SHORTEST, LONGEST)) for _ in range(FAMILIES)]

    @property
    def live_tokens(self) -> int:
        """Tokens of all families."""
        return sum(map(len, self._families))

    async def run(self, http: httpx.AsyncClient, model: str, seconds: float, progress: Callable[[], None]) -> None:
        """Keep CLIENTS requests open for so long, then wait for their ends."""
        end = time.monotonic() + seconds

        async def ask_again() -> None:
            while time.monotonic() < end:
                await self._ask(http, model)
                progress()

        clients = [asyncio.create_task(ask_again()) for _ in range(CLIENTS)]
        done, hung = await asyncio.wait(clients, timeout=seconds + HUNG_S)
        self.hung = len(hung)
        for task in hung:
            task.cancel()
        await asyncio.gather(*hung, return_exceptions=True)
        for task in done:
            task.result()

    async def _ask(self, http: httpx.AsyncClient, model: str) -> None:
        choice = self._random
        body = {
            "model": model,
            "prompt": choice.choices(self._families, self._weights)[0] + self._tokens(choice.randint(0, LONGEST_END)),
            "max_tokens": choice.randint(SHORTEST_ANSWER, LONGEST_ANSWER),
            "temperature": 0,
            "ignore_eos": True,
            "stream": choice.random() < STREAMS,
        }
        leaves = choice.random() < ABORTS
        leaves_after_s = choice.uniform(0.0, LATEST_ABORT_S) if leaves else None
        self.requests += 1
        try:
            async with asyncio.timeout(leaves_after_s):
                await self._answer(http, body)
        except TimeoutError:
            self.aborted += 1  # leaving the block closed the connection
        except httpx.TransportError as error:
            self.errors.append(repr(error))

    async def _answer(self, http: httpx.AsyncClient, body: dict[str, object]) -> None:
        async with http.stream("POST", "/v1/completions", json=body) as response:
            text = (await response.aread()).decode("utf-8", "replace")
        if response.status_code != httpx.codes.OK:
            self.errors.append(f"status {response.status_code}: {text[:200]}")
        elif body["stream"]:
            if not text.rstrip().endswith("data: [DONE]") or '"error"' in text:
                self.errors.append(f"a stream ended with {text[-200:]!r}")
        elif not msgspec.json.decode(text)["choices"][0]["finish_reason"]:
            self.errors.append(f"an answer without an end: {text[-200:]!r}")

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randint(*TOKENS) for _ in range(count)]
