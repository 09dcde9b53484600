"""What the command line is to a scheduler: a gateway without requests, which asks one thing."""

import asyncio
import itertools
import os
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Generic, TypeVar

from kvtide.child import StackError
from shared.errors import ProtocolError
from shared.link import SchedulerLink
from shared.messages import ToGateway
from shared.messages.common import Message
from shared.messages.gateway import GatewayHello

ANSWER_TIMEOUT_S = 3.0  # a scheduler answers between two steps of a few ms; a new one is up within it

CLI_PREFIX = "cli-"  # identities of the command line, which come and go

Answer = TypeVar("Answer", bound=Message)


class Guest(ABC):
    """A gateway without requests: what the command line is to a scheduler. Inside `async with` its link runs, as the
    task that entering returns."""

    _numbers: ClassVar[set[int]] = set()  # of this process's guests: two at a time need two identities

    def __init__(self, endpoint: str) -> None:
        self._number = next(number for number in itertools.count() if number not in self._numbers)
        self._numbers.add(self._number)
        self._identity = f"{CLI_PREFIX}{os.getpid()}-{self._number}"
        self.link = SchedulerLink(endpoint, self._identity, ToGateway, self)

    async def __aenter__(self) -> asyncio.Task[None]:
        self._running = asyncio.create_task(self.link.run())
        await asyncio.sleep(0)  # it has begun: only then does cancelling it close its socket
        return self._running

    async def __aexit__(self, *raised: object) -> None:
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)  # its socket is closed when this returns
        self._numbers.discard(self._number)

    def hello(self) -> Message:
        return GatewayHello(self._identity)

    def stats(self) -> dict[str, float]:
        return {}

    def busy(self) -> bool:
        return True

    @abstractmethod
    def on_scheduler(self, epoch: int) -> None:
        """A scheduler has taken the hello."""

    def on_lost(self) -> None:  # noqa: B027 (most have nothing to do)
        """The link says hello again; who waits has a deadline."""

    @abstractmethod
    def on_message(self, message: Any) -> None:
        """What the scheduler says."""


class _Asker(Guest, Generic[Answer]):
    """Asks once, and keeps the answer."""

    def __init__(self, endpoint: str, question: Message, kind: type[Answer]) -> None:
        super().__init__(endpoint)
        self._question = question
        self._kind = kind
        self.answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

    def on_scheduler(self, epoch: int) -> None:
        self.link.send(self._question)

    def on_message(self, message: Any) -> None:
        if isinstance(message, self._kind) and not self.answer.done():
            self.answer.set_result(message)


async def ask(endpoint: str, question: Message, kind: type[Answer], timeout_s: float = ANSWER_TIMEOUT_S) -> Answer:
    """The scheduler's answer of this kind. Raises StackError when none comes in time, or the scheduler refuses."""
    asker = _Asker(endpoint, question, kind)
    try:
        async with asker as link:
            first: list[asyncio.Future[Any]] = [asker.answer, link]
            await asyncio.wait(first, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if link.done():
                link.result()
            if not asker.answer.done():
                raise StackError(
                    f"no scheduler answers at {endpoint} within {timeout_s:g} s; "
                    "is the stack running (kvtide serve), with the same --config and --set?"
                )
            return asker.answer.result()
    except ProtocolError as error:
        raise StackError(f"the scheduler at {endpoint} refuses: {error}") from None
