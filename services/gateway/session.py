"""One HTTP request's scheduler requests, and the queue of what comes for them."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from services.gateway.errors import ApiError, unavailable
from services.gateway.events import Event, Failed
from services.gateway.job import Job
from services.gateway.limits import MAX_PENDING_EVENTS, REQUEST_MARGIN_S
from shared.messages.gateway import Submit


def request_id(answer: str, choice: int, attempt: int) -> str:
    """What the scheduler calls an attempt at a choice of an answer."""
    return f"{answer}-{choice}-{attempt}"


def answer_id(request: str) -> str:
    """The id of the answer that a scheduler's request belongs to."""
    return request.rsplit("-", 2)[0]


@dataclass(eq=False)
class Ticket:
    """One choice as the scheduler has it. A resubmission is a new attempt under a new request id."""

    session: "Session"
    choice: int
    unplaced_since_s: float  # clock; counts while not `placed`
    attempt: int = 0
    placed: bool = False  # handed to the current scheduler
    shown: bool = False  # the client has been sent tokens: a resubmission would repeat them
    ending: bool = False  # aborted by a stop string, waiting for Finished

    @property
    def request_id(self) -> str:
        """Unique in the gateway's life."""
        return request_id(self.session.job.id, self.choice, self.attempt)

    def message(self) -> Submit:
        """Submit for this attempt, with the time that is left."""
        session = self.session
        return session.job.submit(self.choice, self.request_id, max(0.0, session.expires_s - session.clock()))


class Session:
    """The tickets of one HTTP request and their common, bounded queue."""

    def __init__(self, job: Job, timeout_s: float, clock: Callable[[], float]) -> None:
        self.job = job
        self.clock = clock
        self.timeout_s = timeout_s
        self.expires_s = clock() + timeout_s  # when the scheduler gives it up
        self.tickets = [Ticket(self, choice, clock()) for choice in range(job.choices)]
        self._events: asyncio.Queue[tuple[Ticket, int, Event]] = asyncio.Queue()
        self._overflowed = False

    def put(self, ticket: Ticket, event: Event) -> bool:
        """Queue an event. False when the client is too far behind: what is queued gives way to that error."""
        if self._overflowed:
            return False
        if self._events.qsize() >= MAX_PENDING_EVENTS:
            self._overflowed = True
            while not self._events.empty():
                self._events.get_nowait()
            event = Failed(unavailable("the client reads too slowly: the answer was given up"))
        self._events.put_nowait((ticket, ticket.attempt, event))
        return not self._overflowed

    async def next(self, wait_s: float) -> tuple[Ticket, Event] | None:
        """The next event of a current attempt; None after `wait_s`. Raises ApiError 503 at the request's deadline."""
        left_s = self.expires_s + REQUEST_MARGIN_S - self.clock()
        try:
            async with asyncio.timeout(min(wait_s, left_s)):
                while True:
                    ticket, attempt, event = await self._events.get()
                    if attempt == ticket.attempt:
                        return ticket, event
        except TimeoutError:
            if left_s > wait_s:
                return None
            raise ApiError(
                503,
                f"no answer within {self.timeout_s:.0f} s: ask for fewer tokens or raise scheduler.request_timeout_s",
                code="timeout",
            ) from None
