"""Replay by timestamp: requests that overlap, a machine that takes its time, and the time to first token."""

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from kvtide.replay.costs import Modelled, Speeds
from kvtide.replay.driver import Hits, Outcome, core_settings, hits_of, scaled, submit
from kvtide.replay.peers import GATEWAY, Stack, Tiers
from kvtide.replay.trace import Ids, Trace
from services.scheduler.core.events import Received
from shared.errors import IntegrityError
from shared.messages.gateway import Finish, Reject

STEP_TOKENS = 8192  # of prompts in one step: what engines on a GPU take
AHEAD = 4  # requests at the core for each that may run; the others wait before it, so that its queue stays short


def replay_by_time(
    trace: Trace,
    pages: list[Ids],
    tiers: Tiers,
    eviction: str,
    write_policy: str,
    concurrency: int,
    speeds: Speeds,
    on_request: Callable[[], None] = lambda: None,
) -> tuple[Outcome, dict[str, float]]:
    """Replay each request at its timestamp, `concurrency` at once at most; returns the outcome and TTFT in seconds.

    A request's time to first token runs from its timestamp to the end of its prefill. Decoding isn't modelled.
    """
    hits: dict[int, Hits] = {}
    ttft_s: dict[int, float] = {}
    waiting: deque[int] = deque()

    def answered(message: Any) -> None:
        if isinstance(message, Reject):
            raise IntegrityError(f"the core rejects request {message.request_id}: {message.message}")
        if isinstance(message, Finish):
            number = int(message.request_id)
            request = trace.requests[number]
            hits[number] = hits_of(message.usage, trace.page_size, request.input_tokens)
            ttft_s[number] = stack.now - request.timestamp_ms / 1000
            on_request()

    settings = core_settings(
        trace.page_size, tiers, eviction, write_policy,
        max_running=concurrency, token_budget=scaled(STEP_TOKENS, trace.page_size),
    )  # fmt: skip
    stack = Stack(settings, tiers, Modelled(speeds, trace.page_size), answered)

    def admit() -> None:
        """Give the core what it has room for."""
        while waiting and len(stack.core.requests.all) < AHEAD * concurrency:
            number = waiting.popleft()
            stack.feed(Received(GATEWAY, submit(number, pages[number], tiers.device)))

    for number in sorted(range(len(pages)), key=lambda number: trace.requests[number].timestamp_ms):
        arrival = trace.requests[number].timestamp_ms / 1000
        while stack.run_next(arrival):
            admit()
        stack.now = max(stack.now, arrival)
        waiting.append(number)
        admit()
    while stack.run_next():
        admit()
    if len(hits) != len(pages):
        raise IntegrityError(f"{len(pages) - len(hits)} requests have not ended, though nothing is under way")
    outcome = Outcome(
        [hits[number] for number in range(len(pages))],
        stack.written_host_pages,
        stack.written_storage_pages,
        dict(stack.core.state.counters),
    )
    return outcome, _summary(list(ttft_s.values()))


def _summary(ttft_s: list[float]) -> dict[str, float]:
    p50, p95, p99 = np.percentile(ttft_s, (50, 95, 99)).tolist()
    values = {"mean_s": float(np.mean(ttft_s)), "p50_s": p50, "p95_s": p95, "p99_s": p99}
    return {name: round(value, 4) for name, value in values.items()}
