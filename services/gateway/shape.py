"""What the two routes do differently: how a body becomes a job, how pieces become JSON."""

from typing import Any, Protocol

from services.gateway.choice import Piece
from services.gateway.job import Job


class Shape(Protocol):
    """One route's bodies. The dictionaries are the entries of `choices`."""

    whole: str  # `object` of an answer
    chunk: str  # `object` of a stream's events

    async def job(self, body: bytes) -> Job:
        """Decode, check and tokenize. Raises ApiError."""

    def opening(self, index: int) -> dict[str, Any] | None:
        """A choice's first event in a stream, before any text; None = there is none."""

    def delta(self, job: Job, index: int, piece: Piece) -> list[dict[str, Any]]:
        """The events for a piece."""

    def choice(self, job: Job, index: int, piece: Piece) -> dict[str, Any]:
        """A whole choice."""
