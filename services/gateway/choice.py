"""One choice's tokens become text: characters stay whole, stop strings are cut, log-probabilities stay aligned."""

import json
from dataclasses import dataclass, field

from services.gateway.errors import ApiError
from services.gateway.events import Scored
from services.gateway.job import Job
from services.gateway.stop import StopMatcher
from services.gateway.tool_calls import Call, CallParser, Found
from services.gateway.vocabulary import Detokenizer, Vocabulary


@dataclass(frozen=True)
class Entry:
    """A token and where its text begins."""

    scored: Scored
    offset: int  # characters from the beginning of the choice's text


@dataclass
class Piece:
    """What a choice has gained since its last piece."""

    text: str = ""
    entries: list[Entry] = field(default_factory=list)  # every token
    visible: int = 0  # leading entries whose text is shown; the others belong to a stop string
    finish_reason: str | None = None
    calls: list[Call] = field(default_factory=list)


class Choice:
    """Takes tokens in order; `restart` forgets them all."""

    def __init__(self, job: Job, vocabulary: Vocabulary) -> None:
        self._job = job
        self._vocabulary = vocabulary
        self.restart(0)

    def restart(self, attempt: int) -> None:
        """Begin from nothing: the scheduler does so, too."""
        self.attempt = attempt
        self.tokens = 0  # taken so far
        self.finish_reason: str | None = None
        self.pieces: list[Piece] = []  # kept for an answer that isn't streamed
        self._detokenizer = Detokenizer(self._vocabulary)
        self._matcher = StopMatcher(self._job.stops)
        self._decoded = 0  # characters
        self._shown = 0  # characters
        self._pending: list[Entry] = []
        self._followed = ""  # the text that a grammar has made; empty without one
        calls = self._job.calls
        self._parser = CallParser(calls.notation, calls.names) if calls is not None else None

    @property
    def done(self) -> bool:
        """Has it its last piece?"""
        return self.finish_reason is not None

    def take(self, tokens: list[Scored]) -> Piece:
        """The piece after these tokens: its `finish_reason` is "stop" when a stop string was met, else None."""
        text = ""
        for scored in tokens:
            self.tokens += 1
            self._pending.append(Entry(scored, self._decoded))
            if scored.token in self._job.stop_token_ids:
                continue  # the end itself isn't text
            decoded = self._detokenizer.feed(scored.token)
            self._decoded += len(decoded)
            cut = self._matcher.feed(decoded)
            text += cut.text
            if cut.stopped:
                return self._last(text, "stop", stopped=True)
        return self._release(text)

    def finish(self, reason: str) -> Piece:
        """The last piece: everything that was held back. Raises ApiError 422 when the worker gave a grammar up."""
        held = self._matcher.feed(self._detokenizer.flush())
        text = held.text if held.stopped else held.text + self._matcher.flush()
        piece = self._last(text, reason, stopped=held.stopped)
        if reason == "stop" and self._job.guide.grammar and not (held.stopped or self._fulfilled()):
            raise ApiError(
                422,
                "the schema became too complex to follow in this answer: simplify it",
                param="response_format",
                code="grammar_failed",
            )
        return piece

    def _fulfilled(self) -> bool:
        if self._parser is not None and self._parser.found:
            return True
        try:
            json.loads(self._followed)
        except (ValueError, RecursionError):
            return False
        return True

    def _release(self, text: str) -> Piece:
        self._shown += len(text)
        if self._job.guide.grammar:
            self._followed += text
        found = self._parser.feed(text) if self._parser is not None else Found(text, [])
        ready = 0
        if found.text or found.calls:  # tokens wait until they have something to show
            while ready < len(self._pending) and self._pending[ready].offset < self._shown:
                ready += 1
        piece = Piece(found.text, self._pending[:ready], ready, calls=found.calls)
        del self._pending[:ready]
        if not self._job.stream:
            self.pieces.append(piece)
        return piece

    def _last(self, text: str, reason: str, stopped: bool) -> Piece:
        piece = self._release(text)
        if self._parser is not None:
            rest = self._parser.flush()
            piece.text += rest.text
            piece.calls = piece.calls + rest.calls
            reason = "tool_calls" if self._parser.found and reason == "stop" else reason
        shown = sum(entry.offset < self._shown for entry in self._pending)
        piece.visible = len(piece.entries) + (shown if stopped else len(self._pending))
        piece.entries = piece.entries + self._pending
        piece.finish_reason = reason
        self._pending = []
        self.finish_reason = reason
        return piece


def join(pieces: list[Piece]) -> Piece:
    """All pieces of a choice as one; only the last may hold invisible entries."""
    return Piece(
        "".join(piece.text for piece in pieces),
        [entry for piece in pieces for entry in piece.entries],
        sum(piece.visible for piece in pieces),
        pieces[-1].finish_reason if pieces else None,
        [call for piece in pieces for call in piece.calls],
    )
