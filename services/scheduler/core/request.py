"""A request inside the core."""

from collections import deque
from enum import Enum
from typing import NamedTuple

import numpy as np

from services.scheduler.core.events import PeerKey
from services.scheduler.core.ghosts import Fate, Reason
from services.scheduler.core.node import Node
from services.scheduler.core.operations import Find, Load, Prefetch
from services.scheduler.core.pages import NO_PAGES, HostPool, Pages
from services.scheduler.core.tree_holds import Lock
from shared.messages.gateway import Submit, Usage

MAX_NOTES = 8  # about lookups: three lookups, each with its prefetch, and two in reserve


class RequestState(Enum):
    """Where a request stands (docs/architecture.md: A request)."""

    QUEUED = "queued"
    LOOKUP = "lookup"
    PREFETCHING = "prefetching"
    READY = "ready"
    RUNNING = "running"
    RETRACTED = "retracted"
    DRAINING = "draining"


class RequestKey(NamedTuple):
    """A request id is unique within its gateway process."""

    gateway: PeerKey
    request_id: str


class LookupNote(NamedTuple):
    """What a request's lookup or prefetch has told of some pages."""

    first: int  # page
    last: int  # page after the last
    reason: Reason  # "never_seen": L3 says that it hasn't got them
    cause: str = ""


class Reservation(NamedTuple):
    """What was fetched for a request that isn't admitted yet: it can't be evicted."""

    lock: Lock
    pool: HostPool
    pages: int  # counted in the pool's share of prefetches


class Request:
    """Prompt, output and what it holds.

    pages:   | 0 .. shared: the tree's, under `lock` | shared ..: its own |
    tokens:  | 0 .. computed: K/V is there | .. scheduled: in a step in flight | .. len: known |
    """

    def __init__(self, key: RequestKey, submit: Submit, seed: bytes, number: int, now: float) -> None:
        self.key = key
        self.seed = seed  # of its namespace
        self.tenant = submit.namespace.tenant
        self.number = number  # order of arrival
        self.priority = submit.priority
        self.sampling = submit.sampling
        self.stop_token_ids = frozenset(submit.stop_token_ids)
        self.tokens = bytearray(submit.tokens)  # packed int32, prompt and output
        self.prompt_tokens = self.length
        self.max_tokens = submit.max_tokens
        self.arrived = now
        self.deadline = now + submit.timeout_s
        self.state = RequestState.QUEUED
        self.state_deadline = float("inf")  # of LOOKUP or PREFETCHING
        self.trusted = True  # its computed pages may join the tree
        self.lookups = 0
        self.fetch: Find | Prefetch | None = None  # what it waits for

        self.row = 0  # of req_to_token; 0 = none
        self.pages: Pages = NO_PAGES
        self.shared = 0  # leading pages that are the tree's
        self.lock: Lock | None = None
        self.reserved: Reservation | None = None
        self.loads: set[Load] = set()  # that fill pages of its path
        self.synced = 0  # leading pages that the worker's row holds already
        self.computed = 0
        self.scheduled = 0
        self.in_flight = 0  # steps
        self.attempt = 0  # results of steps of an earlier attempt are ignored
        self.counted = 0  # leading pages whose hits are counted
        self.frequencies = b""  # of its whole pages at its first admission, for eviction "auto"

        self.output_tokens = 0
        self.step_failures = 0
        self.load_failures = 0
        self.unloaded: Fate | None = None  # why what host memory had at its admission was not loaded
        self.retracted = 0
        self.prefetched = (0, 0)  # page range that L3 gave for it
        self.lookup_notes: deque[LookupNote] = deque(maxlen=MAX_NOTES)
        self.explained: int | None = None  # `load_failures` when `hits` were found
        self.hits: tuple[int, int, int] | None = None  # device, host, storage tokens of the first admission
        self.started: float | None = None

    def __repr__(self) -> str:
        return f"<Request {self.key.request_id} {self.state.value} {self.computed}/{self.length}>"

    @property
    def length(self) -> int:
        """Known tokens."""
        return len(self.tokens) // 4

    def history(self, end: int) -> bytes:
        """The tokens before `end` that its guide looks back at, packed int32: the worker remembers none."""
        guide = self.sampling.guide
        return b"" if guide is None else bytes(self.tokens[4 * guide.looks_from : 4 * end])

    @property
    def order(self) -> tuple[int, int]:
        """Who comes first: higher priority, then earlier arrival."""
        return (-self.priority, self.number)

    @property
    def own_pages(self) -> Pages:
        """Pages that are in no node."""
        return self.pages[self.shared :]

    def note(self, first: int, last: int, reason: Reason, cause: str = "") -> None:
        """Why pages `first` to `last` didn't come from L3; later notes count more than earlier ones."""
        if first < last:
            self.lookup_notes.append(LookupNote(first, last, reason, cause))

    def lookup_note(self, page: int) -> LookupNote | None:
        """The last note about a page."""
        return next((note for note in reversed(self.lookup_notes) if note.first <= page < note.last), None)

    def take_path(self, path: list[Node], page_size: int) -> None:
        """Begin on the device with the pages of a locked path."""
        self.pages = np.concatenate([node.value for node in path if node.value is not None] or [NO_PAGES])
        self.shared = len(self.pages)
        self.computed = self.scheduled = self.shared * page_size

    def extend_pages(self, pages: Pages) -> None:
        """Add pages of its own."""
        self.pages = np.concatenate([self.pages, pages])

    def has_new_pages(self, page_size: int) -> bool:
        """Are there computed pages of the prompt that haven't joined the tree?"""
        return self.lock is not None and self.shared < min(self.computed, self.prompt_tokens) // page_size

    def rewind(self) -> None:
        """Nothing is in flight: what was scheduled in vain is scheduled again. Its page table may not have arrived."""
        self.scheduled, self.synced = self.computed, 0

    def leave_device(self) -> None:
        """Forget everything that belongs to this stay on the device."""
        self.pages, self.shared, self.synced = NO_PAGES, 0, 0
        self.row = self.computed = self.scheduled = self.in_flight = 0
        self.trusted = True
        self.attempt += 1

    def usage(self) -> Usage:
        """For Finish."""
        device, host, storage = self.hits or (0, 0, 0)
        waited = (self.started if self.started is not None else self.arrived) - self.arrived
        return Usage(self.prompt_tokens, self.output_tokens, device, host, storage, self.retracted, waited)
