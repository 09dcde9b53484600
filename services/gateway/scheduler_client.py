"""The gateway's side of the scheduler link: requests go out, events come back, a lost scheduler costs time.

A request of which the client has seen nothing is submitted again to the next scheduler; one whose tokens are being
streamed ends with an error that says so.
"""

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from services.gateway.errors import ApiError, rejected, unavailable
from services.gateway.events import Event, Failed, Finished, unpack_emission
from services.gateway.job import Job
from services.gateway.limits import (
    ADMIN_TIMEOUT_S,
    MAX_OWED_ABORTS,
    MAX_RESUBMISSIONS,
    NO_SCHEDULER_S,
    PLACE_RETRY_S,
    STATUS_TIMEOUT_S,
)
from services.gateway.session import Session, Ticket
from shared.errors import ProtocolError
from shared.link import SchedulerLink
from shared.messages import ToGateway
from shared.messages.common import Message
from shared.messages.gateway import (
    Abort,
    Administer,
    Administered,
    EmitTokens,
    Finish,
    GatewayHello,
    Reject,
    Status,
    StatusWanted,
    Why,
    WhyWanted,
)

log = logging.getLogger("kvtide.gateway")


class SchedulerClient:
    """Owner of the link (see `shared.link.LinkOwner`) and of every open ticket."""

    def __init__(
        self, endpoint: str, identity: str, request_timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.link = SchedulerLink(endpoint, identity, ToGateway, self, on_missed=self.on_missed)
        self._identity = identity
        self._request_timeout_s = request_timeout_s
        self._clock = clock
        self._tickets: dict[str, Ticket] = {}  # by the current attempt's request id
        self._owed: deque[str] = deque(maxlen=MAX_OWED_ABORTS)  # request ids to abort once the scheduler is heard
        self._aborted: dict[str, None] = {}  # request ids whose Abort was sent and whose Finish hasn't come
        self._epoch = 0
        self._wake = asyncio.Event()
        self._asking: list[asyncio.Future[bytes]] = []
        self._questions: dict[int, asyncio.Future[Any]] = {}  # without an answer, by number
        self._asked = 0

    async def run(self) -> None:
        """Serve until cancelled. Raises ProtocolError when the scheduler refuses this gateway for good."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.link.run())
                tasks.create_task(self._keep_placing())
        except* ProtocolError as group:
            raise group.exceptions[0] from None

    @contextmanager
    def open(self, job: Job) -> Iterator[Session]:
        """Submit every choice of a job; whatever isn't finished at the end is aborted."""
        session = Session(job, self._request_timeout_s, self._clock)
        for ticket in session.tickets:
            self._tickets[ticket.request_id] = ticket
            self._place(ticket)
        self.link.quicken()
        try:
            yield session
        finally:
            for ticket in session.tickets:
                self._abort(ticket)

    def end_early(self, ticket: Ticket) -> None:
        """A stop string has ended the choice. The scheduler may still answer with Finish and its usage."""
        if ticket.request_id in self._tickets:
            ticket.ending = True
            self._send_abort(ticket.request_id)

    def fail_all(self, error: ApiError) -> None:
        """End every open request with an error."""
        for ticket in list(self._tickets.values()):
            self._fail(ticket, error)

    async def status(self) -> bytes | None:
        """The scheduler's Status body; None when there is no answer within STATUS_TIMEOUT_S."""
        if not self.link.up:
            return None
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._asking.append(answer)
        self.link.send(StatusWanted())
        try:
            async with asyncio.timeout(STATUS_TIMEOUT_S):
                return await answer
        except TimeoutError:
            return None
        finally:
            self._asking.remove(answer)

    async def why(self, request_ids: list[str]) -> list[dict[str, Any]] | None:
        """What the scheduler knows of these requests; None when it doesn't answer in time."""
        body = await self._ask(lambda question: WhyWanted(question, request_ids), STATUS_TIMEOUT_S)
        found: list[dict[str, Any]] | None = json.loads(body) if body is not None else None
        return found

    async def administer(self, make: Callable[[int], Administer]) -> Administered | None:
        """Have the running stack changed; None when the scheduler doesn't answer in time. make: from its number."""
        answer = await self._ask(make, ADMIN_TIMEOUT_S)
        assert answer is None or isinstance(answer, Administered)
        return answer

    async def _ask(self, make: Callable[[int], Message], timeout_s: float) -> Any:
        if not self.link.up:
            return None
        self._asked += 1
        question, answer = self._asked, asyncio.get_running_loop().create_future()
        self._questions[question] = answer
        self.link.send(make(question))
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            return None
        finally:
            del self._questions[question]

    # What the link asks and tells.

    def hello(self) -> Message:
        """The greeting."""
        return GatewayHello(self._identity)

    def stats(self) -> dict[str, float]:
        """For the heartbeat."""
        return {"open": float(len(self._tickets))}

    def busy(self) -> bool:
        """Is a request open?"""
        return bool(self._tickets)

    def on_scheduler(self, epoch: int) -> None:
        """A scheduler has taken the hello: hand it what is open."""
        if epoch != self._epoch:
            self._owed.clear()
            self._aborted.clear()
            self._restart_placed()
            self._epoch = epoch
        log.info("scheduler_found epoch=%d open=%d", epoch, len(self._tickets))
        self._place_all()

    def on_lost(self) -> None:
        """The scheduler is silent. Should it come back with the same epoch, it must forget the old attempts."""
        placed = [ticket.request_id for ticket in self._tickets.values() if ticket.placed]
        self._owed.extend(dict.fromkeys([*self._aborted, *placed]))
        self._aborted.clear()
        self._restart_placed()

    def on_missed(self) -> None:
        """Messages of either side were lost: an attempt may lack tokens or its end, or never have come."""
        self.on_lost()
        self._wake.set()

    def on_message(self, message: Any) -> None:
        """A message of the current scheduler."""
        match message:
            case EmitTokens():
                for emission in message.emissions:
                    if ticket := self._tickets.get(emission.request_id):
                        try:
                            self._put(ticket, unpack_emission(emission))
                        except ProtocolError as error:
                            log.warning("emission_malformed request=%s detail=%s", emission.request_id, error)
                            self._fail(ticket, ApiError(500, "the scheduler sent a malformed answer", code="internal"))
            case Finish():
                self._aborted.pop(message.request_id, None)
                if ticket := self._tickets.pop(message.request_id, None):
                    self._put(ticket, Finished(message.reason, message.usage))
            case Reject():
                self._aborted.pop(message.request_id, None)
                if ticket := self._tickets.get(message.request_id):
                    ticket.placed = False
                    self._fail(ticket, rejected(message.code, message.message, message.retry))
            case Why(question, body):
                self._answered(question, body)
            case Administered(question):
                self._answered(question, message)
            case Status():
                for answer in self._asking:
                    if not answer.done():
                        answer.set_result(message.body)

    def _answered(self, question: int, answer: Any) -> None:
        asked = self._questions.get(question)
        if asked is not None and not asked.done():
            asked.set_result(answer)

    # Tickets.

    def _place(self, ticket: Ticket) -> None:
        ticket.placed = self.link.up and self.link.send(ticket.message())
        if not ticket.placed:
            self._wake.set()

    async def _keep_placing(self) -> None:
        while True:
            await self._wake.wait()
            self._place_all()
            if self._owed or any(not ticket.placed for ticket in self._tickets.values()):
                await asyncio.sleep(PLACE_RETRY_S)
            else:
                self._wake.clear()

    def _place_all(self) -> None:
        while self._owed and self._tell_abort(self._owed[0]):
            self._owed.popleft()
        now_s = self._clock()
        for ticket in [ticket for ticket in self._tickets.values() if not ticket.placed]:
            self._place(ticket)
            if not ticket.placed and now_s - ticket.unplaced_since_s > NO_SCHEDULER_S:
                self._fail(
                    ticket, unavailable(f"no scheduler for {NO_SCHEDULER_S:.0f} s: check that it runs (kvtide status)")
                )

    def _restart_placed(self) -> None:
        for ticket in [ticket for ticket in self._tickets.values() if ticket.placed]:
            del self._tickets[ticket.request_id]
            if ticket.ending:
                self._put(ticket, Finished("abort", None))
                continue
            lost = unavailable("the scheduler or a part of its answer was lost: send the request again")
            if ticket.shown or ticket.attempt >= MAX_RESUBMISSIONS:
                self._put(ticket, Failed(lost))
                continue
            ticket.attempt += 1
            ticket.placed = False
            ticket.unplaced_since_s = self._clock()
            self._tickets[ticket.request_id] = ticket
            self._wake.set()

    def _put(self, ticket: Ticket, event: Event) -> None:
        if not ticket.session.put(ticket, event):
            self._abort(ticket)

    def _fail(self, ticket: Ticket, error: ApiError) -> None:
        self._abort(ticket)
        ticket.session.put(ticket, Failed(error))

    def _abort(self, ticket: Ticket) -> None:
        if self._tickets.pop(ticket.request_id, None) and ticket.placed and not ticket.ending:
            self._send_abort(ticket.request_id)

    def _send_abort(self, request_id: str) -> None:
        if not self._tell_abort(request_id):
            self._owed.append(request_id)
            self._wake.set()

    def _tell_abort(self, request_id: str) -> bool:
        if not (self.link.up and self.link.send(Abort(request_id))):
            return False
        self._aborted[request_id] = None
        if len(self._aborted) > MAX_OWED_ABORTS:
            del self._aborted[next(iter(self._aborted))]
        return True
