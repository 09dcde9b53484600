"""A client that asks again after a retryable error, and keeps every token that came."""

import asyncio
import contextlib
import time

from kvtide.chat_client import Answer, RequestError, client, complete
from kvtide.child import StackError
from kvtide.oracle import Emitted
from tests.faults.matrix.target import Target

END_S = 120.0  # from the question to the answer, with a service's restart and the client's retries between them
RETRY_S = 0.5  # what the client waits before it asks again


class Asked:
    """One request of a client that doesn't give up."""

    def __init__(self, target: Target, text: str | list[int], max_tokens: int, end_s: float = END_S) -> None:
        self.attempts: list[Answer] = []
        self.errors: list[str] = []  # all retryable
        self.longest_s = 0.0  # of an attempt that has ended
        self._target = target
        self._text = text
        self._max_tokens = max_tokens
        self._end_s = end_s
        self._task = asyncio.create_task(self._run())

    @property
    def tokens(self) -> int:
        """That the last attempt has so far."""
        return len(self.attempts[-1].tokens) if self.attempts else 0

    @property
    def emitted(self) -> list[Emitted]:
        """Every token that reached the client, those of broken answers too."""
        return [answer.emitted for answer in self.attempts if answer.tokens]

    @property
    def ended(self) -> bool:
        """Answered, refused or given up."""
        return self._task.done()

    async def answered(self) -> Answer:
        """Wait for the answer. Raises RequestError for an error that isn't retryable, TimeoutError after `end_s`."""
        return await self._task

    async def cancel(self) -> None:
        """Close the connection."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await self._task

    async def _run(self) -> Answer:
        async with asyncio.timeout(self._end_s):
            while True:
                answer = Answer()
                self.attempts.append(answer)
                begun_s = time.monotonic()
                try:
                    async with client(self._target.url) as http:
                        options = {"max_tokens": self._max_tokens, "ignore_eos": True}
                        return await complete(http, self._target.model, self._text, answer, **options)
                except RequestError as error:
                    if not error.retryable:
                        raise
                    self.errors.append(str(error))
                except StackError as error:  # the gateway hasn't opened its port yet
                    self.errors.append(str(error))
                finally:
                    self.longest_s = max(self.longest_s, time.monotonic() - begun_s)
                await asyncio.sleep(RETRY_S)
