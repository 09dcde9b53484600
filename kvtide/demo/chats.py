"""The chats of the demo: eight conversations at once. Some wait for an answer while the others are read."""

import asyncio
from collections.abc import Callable, Iterable

import httpx

from kvtide.chat_client import Answer, chat, client
from kvtide.demo.plan import MAX_TOKENS, QUESTIONS, WAITING, Document, opening
from kvtide.stack import Stack


class Session:
    """One conversation about one text."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.answers: list[Answer] = []  # by turn
        self._messages = opening(document)

    async def ask(self, http: httpx.AsyncClient, model: str) -> Answer:
        """Ask the next question and keep the answer."""
        if self.answers:
            self._messages.append({"role": "assistant", "content": self.answers[-1].text})
            self._messages.append({"role": "user", "content": QUESTIONS[len(self.answers)]})
        self.answers.append(await chat(http, model, self._messages, max_tokens=MAX_TOKENS))
        return self.answers[-1]


async def ask_all(stack: Stack, sessions: Iterable[Session], turns: int, progress: Callable[[], None]) -> list[Answer]:
    """All sessions at once, `turns` questions each, WAITING of them open at a time; the answers as they came.

    Raises StackError at the first request that fails, or when the stack does.
    """
    answers: list[Answer] = []

    waiting = asyncio.Semaphore(WAITING)  # first come, first served: the chats take turns

    async def converse(http: httpx.AsyncClient, session: Session) -> None:
        for _ in range(turns):
            async with waiting:
                answers.append(await session.ask(http, stack.config.model.name))
            progress()

    async with client(stack.url) as http:
        watch = asyncio.create_task(stack.watch())
        chats = asyncio.gather(*(converse(http, session) for session in sessions))
        try:
            first: list[asyncio.Future[object]] = [watch, chats]  # type: ignore[list-item]
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if watch.done():
                watch.result()
            await chats
        finally:
            watch.cancel()
            chats.cancel()
            await asyncio.gather(watch, chats, return_exceptions=True)
    return answers
