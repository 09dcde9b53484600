"""The choices of one answer as they grow, and what they cost."""

from typing import Any, NamedTuple

from services.gateway.choice import Choice, Piece
from services.gateway.events import Event, Failed, Finished, Tokens
from services.gateway.limits import KEEP_ALIVE_S, USAGE_WAIT_S
from services.gateway.model import Model
from services.gateway.records import Hits, Record
from services.gateway.scheduler_client import SchedulerClient
from services.gateway.session import Session, Ticket
from services.gateway.why import explain
from shared.messages.gateway import Usage


class Growth(NamedTuple):
    """A choice's new piece."""

    choice: int
    piece: Piece


class Answer:
    """Reads a session's events."""

    def __init__(self, session: Session, client: SchedulerClient, model: Model, record: Record) -> None:
        self._session = session
        self._client = client
        self._record = record
        self._job = session.job
        self.choices = [Choice(self._job, model.vocabulary) for _ in session.tickets]
        self._explanation: list[dict[str, Any]] | None = None
        self._usages: dict[int, Usage | None] = {}  # by choice

    @property
    def done(self) -> bool:
        """Has every choice its last piece?"""
        return all(choice.done for choice in self.choices)

    async def next(self) -> Growth | None:
        """The next piece that a client can see; None when KEEP_ALIVE_S passed without one. Raises ApiError."""
        while True:
            got = await self._session.next(KEEP_ALIVE_S)
            if got is None:
                return None
            ticket, event = got
            piece = self._take(ticket, event)
            if piece is not None and (piece.text or piece.calls or piece.finish_reason):
                ticket.shown = self._job.stream
                return Growth(ticket.choice, piece)

    async def settle(self) -> None:
        """Wait a moment for the usage of choices that a stop string has ended, and for an explanation if one is wanted;
        then fill the record."""
        while len(self._usages) < len(self.choices):
            got = await self._session.next(USAGE_WAIT_S)
            if got is None:
                break
            if isinstance(got[1], Finished):
                self._usages[got[0].choice] = got[1].usage
        if self._job.explain:
            self._explanation = await explain(self._client, self._session.tickets)
        self.note()

    def note(self) -> None:
        """Bring the record up to date."""
        self._record.completion_tokens = sum(choice.tokens for choice in self.choices)
        self._record.longest = max(choice.tokens for choice in self.choices)
        self._record.queue_s = self.extras()["queue_s"]
        self._record.finish = ",".join(choice.finish_reason or "-" for choice in self.choices)
        firsts = [self._first_usage(prompt) for prompt in range(len(self._job.prompts))]
        known = [usage for usage in firsts if usage is not None]
        if len(known) == len(firsts):
            self._record.hits = Hits(
                sum(usage.device_hit_tokens for usage in known),
                sum(usage.host_hit_tokens for usage in known),
                sum(usage.storage_hit_tokens for usage in known),
            )

    def extras(self) -> dict[str, Any]:
        """What OpenAI's usage has no name for: the longest wait in the queue, retractions, the explanation."""
        known = [usage for usage in self._usages.values() if usage is not None]
        extras: dict[str, Any] = {
            "queue_s": max((usage.queue_s for usage in known), default=None),
            "retracted": sum(usage.retracted for usage in known),
        }
        return extras | {"explanation": self._explanation} if self._job.explain else extras

    def _take(self, ticket: Ticket, event: Event) -> Piece | None:
        choice = self.choices[ticket.choice]
        if choice.attempt != ticket.attempt:
            choice.restart(ticket.attempt)
        match event:
            case Failed(error):
                raise error
            case Finished(reason, usage):
                self._usages[ticket.choice] = usage
                return None if choice.done else choice.finish(reason)
            case Tokens(tokens):
                if choice.done:
                    return None
                self._record.first_token()
                piece = choice.take(tokens)
                if piece.finish_reason is not None:
                    self._client.end_early(ticket)
                return piece

    def _first_usage(self, prompt: int) -> Usage | None:
        """From the first of the prompt's choices: the others also hit what that one has computed."""
        choices = range(prompt * self._job.n, (prompt + 1) * self._job.n)
        return next((usage for choice in choices if (usage := self._usages.get(choice)) is not None), None)


def usage_body(record: Record) -> dict[str, Any]:
    """OpenAI's usage with the hits split by tier; without the split when the scheduler couldn't say."""
    body: dict[str, Any] = {
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "total_tokens": record.prompt_tokens + record.completion_tokens,
    }
    if record.hits is not None:
        body["prompt_tokens_details"] = {
            "cached_tokens": sum(record.hits),
            "device_tokens": record.hits.device,
            "host_tokens": record.hits.host,
            "storage_tokens": record.hits.storage,
        }
    return body
