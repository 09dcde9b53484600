"""Drives the core with a trace's requests, one by one in order, and counts what it finds."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from kvtide.replay.costs import Instant
from kvtide.replay.peers import GATEWAY, PAGE_TOKENS, Stack, Tiers
from kvtide.replay.trace import Ids, Trace
from services.scheduler.core.events import Received
from services.scheduler.core.settings import CoreSettings
from shared.errors import IntegrityError
from shared.messages.gateway import Finish, Namespace, Reject, Submit, Usage
from shared.messages.worker import Sampling

NEXT_TOKEN = b"\0\0\0\0"  # after the last page: the core never gives a request its last token from the cache
GREEDY = Sampling(0.0, 1.0, 0, 0.0, 0, 0, 0)
TIMEOUT_S = 1e9  # no request is given up
WHOLE_PROMPT = 2**30  # tokens of a step
WAIT = "wait_complete"  # for all that L3 has


class Hits(NamedTuple):
    """What the tiers gave to one request, tokens."""

    device: int
    host: int
    storage: int

    @property
    def total(self) -> int:
        """Tokens that were not computed."""
        return self.device + self.host + self.storage


class Outcome(NamedTuple):
    """One replay."""

    hits: list[Hits]  # for each request
    written_host_pages: int
    written_storage_pages: int
    counters: dict[str, int]  # of the core


def core_settings(page_size: int, tiers: Tiers, eviction: str, write_policy: str, **more: Any) -> CoreSettings:
    """The core's settings for a replay; thresholds in tokens become pages of `page_size` tokens."""
    defaults = CoreSettings()
    return CoreSettings(
        page_size=PAGE_TOKENS,
        write_policy=write_policy,  # type: ignore[arg-type]
        eviction=eviction,  # type: ignore[arg-type]
        load_back_threshold=scaled(defaults.load_back_threshold, page_size),
        prefetch=tiers.storage > 0,
        prefetch_threshold=scaled(defaults.prefetch_threshold, page_size),
        host_tier=tiers.host > 0,
        explain=False,  # nobody asks why, and remembering costs a digest for each page
        request_timeout_s=TIMEOUT_S,
        **more,
    )


def scaled(tokens: int, page_size: int) -> int:
    """Tokens of the trace as tokens of the core, whole pages."""
    return -(-tokens // page_size) * PAGE_TOKENS


def pages_of(trace: Trace, *, partial: bool) -> list[Ids]:
    """Each request's page ids, with or without its partial last page (POLICY-01)."""
    return [request.ids if partial else request.whole(trace.page_size) for request in trace.requests]


def submit(number: int, ids: Ids, limit: int) -> Submit:
    """The message for a request, cut to the `limit` pages that the device pool holds."""
    tokens = ids[:limit].astype("<i8").tobytes() + NEXT_TOKEN
    return Submit(str(number), tokens, 1, [], GREEDY, Namespace(), 0, TIMEOUT_S)


def hits_of(usage: Usage, page_size: int, input_tokens: int) -> Hits:
    """Tokens of the trace for a request's hits; only the last page can be partial."""
    ends = np.cumsum([usage.device_hit_tokens, usage.host_hit_tokens, usage.storage_hit_tokens]) // PAGE_TOKENS
    tokens = np.diff(np.minimum(ends * page_size, input_tokens), prepend=0)
    return Hits(*tokens.tolist())


def replay(
    trace: Trace,
    pages: list[Ids],
    tiers: Tiers,
    eviction: str = "lru",
    write_policy: str = "write_through",
    on_request: Callable[[], None] = lambda: None,
) -> Outcome:
    """Replay all requests, each when the one before has ended and every copy it caused is done."""
    finished: list[Usage] = []

    def answered(message: Any) -> None:
        if isinstance(message, Finish):
            finished.append(message.usage)
        elif isinstance(message, Reject):
            raise IntegrityError(f"the core rejects request {message.request_id}: {message.message}")

    settings = core_settings(
        trace.page_size, tiers, eviction, write_policy, max_running=1, token_budget=WHOLE_PROMPT, prefetch_policy=WAIT
    )
    stack = Stack(settings, tiers, Instant(), answered)
    hits = []
    for number, (request, ids) in enumerate(zip(trace.requests, pages, strict=True)):
        stack.now = max(stack.now, request.timestamp_ms / 1000)
        stack.feed(Received(GATEWAY, submit(number, ids, tiers.device)))
        stack.run()
        if len(finished) != number + 1:
            raise IntegrityError(f"request {number} of {trace.name} has not ended, though nothing is under way")
        hits.append(hits_of(finished[number], trace.page_size, request.input_tokens))
        on_request()
    return Outcome(hits, stack.written_host_pages, stack.written_storage_pages, dict(stack.core.state.counters))
