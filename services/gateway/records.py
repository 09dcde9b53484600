"""One record for each generation request: a log line and the metrics at its end. No text, no tokens."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from services.gateway.errors import ApiError
from services.gateway.limits import MAX_OPEN_REQUESTS, RETRY_BUSY_S
from services.gateway.metrics import GatewayMetrics

CLIENT_GONE = 499  # nginx's status for a client that closed the connection

log = logging.getLogger("kvtide.gateway")


class Hits(NamedTuple):
    """Prompt tokens that weren't computed, by the tier that held them."""

    device: int
    host: int
    storage: int


@dataclass
class Record:
    """What is known of one request so far."""

    route: str
    started_s: float
    clock: Callable[[], float]
    id: str = "-"
    status: int = 500  # HTTP status sent, or that of the error that ended a stream
    finish: str = "-"
    prompt_tokens: int = 0
    completion_tokens: int = 0
    hits: Hits | None = None
    ttft_s: float | None = None
    longest: int = 0  # tokens of the longest choice
    queue_s: float | None = None  # longest wait of a choice

    def attributes(self) -> dict[str, Any]:
        """For a trace, named as OpenTelemetry does where it has a name."""
        return {
            "kvtide.request_id": self.id,
            "http.response.status_code": self.status,
            "gen_ai.response.finish_reasons": None if self.finish == "-" else self.finish.split(","),
            "gen_ai.usage.input_tokens": self.prompt_tokens,
            "gen_ai.usage.output_tokens": self.completion_tokens,
            "kvtide.ttft_s": self.ttft_s,
        } | ({f"kvtide.{tier}_hit_tokens": tokens for tier, tokens in self.hits._asdict().items()} if self.hits else {})

    def first_token(self) -> None:
        """Tokens have arrived."""
        if self.ttft_s is None:
            self.ttft_s = self.clock() - self.started_s


class Records:
    """The open requests, a bounded number of them."""

    def __init__(self, metrics: GatewayMetrics, clock: Callable[[], float] = time.monotonic) -> None:
        self.open = 0
        self._metrics = metrics
        self._clock = clock

    @contextmanager
    def begin(self, route: str) -> Iterator[Record]:
        """A place for one request, from its headers to its last byte. Raises ApiError 429 when all are taken."""
        if self.open >= MAX_OPEN_REQUESTS:
            raise ApiError(
                429,
                f"{MAX_OPEN_REQUESTS} requests are open: wait and send it again",
                code="overloaded",
                retry_after_s=RETRY_BUSY_S,
            )
        record = Record(route, self._clock(), self._clock)
        self.open += 1
        try:
            yield record
        finally:
            self.open -= 1
            self._end(record)

    def _end(self, record: Record) -> None:
        seconds = self._clock() - record.started_s
        device, host, storage = record.hits or ("-", "-", "-")
        log.info(
            "request id=%s route=%s status=%d finish=%s prompt_tokens=%d device=%s host=%s storage=%s "
            "completion_tokens=%d ttft_ms=%s seconds=%.3f",
            record.id,
            record.route,
            record.status,
            record.finish,
            record.prompt_tokens,
            device,
            host,
            storage,
            record.completion_tokens,
            "-" if record.ttft_s is None else f"{1000 * record.ttft_s:.0f}",
            seconds,
        )
        metrics = self._metrics
        metrics.requests.add(record.route, str(record.status))
        metrics.generation_tokens.add(amount=record.completion_tokens)
        for tier, tokens in (record.hits or Hits(0, 0, 0))._asdict().items():
            metrics.cached_tokens.add(tier, amount=tokens)
        if record.ttft_s is not None:
            metrics.prompt_tokens.add(amount=record.prompt_tokens)
            metrics.ttft.observe(record.ttft_s)
            metrics.e2e.observe(seconds)
            if record.longest > 1:
                metrics.tpot.observe((seconds - record.ttft_s) / (record.longest - 1))
            if record.queue_s is not None:
                metrics.queue.observe(record.queue_s)
