"""Admission and batching: what the next step computes. The oldest request always gets on (never a deadlock)."""

from services.scheduler.core.backup import Backup
from services.scheduler.core.device_memory import DeviceMemory
from services.scheduler.core.load_back import LoadBack
from services.scheduler.core.node import Node
from services.scheduler.core.operations import Adopt, Load, Step
from services.scheduler.core.pins import Pins
from services.scheduler.core.prefetch import Prefetcher
from services.scheduler.core.request import Request, RequestState
from services.scheduler.core.requests import Requests
from services.scheduler.core.reuse import mark
from services.scheduler.core.state import State
from services.scheduler.core.tree import Match
from services.scheduler.core.why import Why
from services.scheduler.core.worth import SLOW_LOAD, load_refusal
from shared.messages.worker import RunStep, StepItem
from shared.packed import pack

WAITING = (RequestState.READY, RequestState.RETRACTED)  # no set: an Enum's hash takes longer than to look at both


class Admission:
    """Plans steps: running requests first, then waiting ones, oldest first."""

    def __init__(
        self,
        state: State,
        requests: Requests,
        device: DeviceMemory,
        prefetcher: Prefetcher,
        load_back: LoadBack,
        backup: Backup,
        why: Why,
        pins: Pins,
    ) -> None:
        self._state = state
        self._requests = requests
        self._device = device
        self._prefetcher = prefetcher
        self._load_back = load_back
        self._backup = backup
        self._why = why
        self._pins = pins
        self.max_steps = 1  # the worker's window
        self._short = False  # an older request lacks pages: no younger one runs ahead, so that it can be retracted
        self.in_order = True  # False: a worker has missed a step, so that none follows until those in flight have ended

    def plan(self) -> None:
        """Send the next step if the worker takes one and there is something to compute."""
        state = self._state
        if not self._requests.all:
            return
        self.in_order = self.in_order or not state.operations.steps
        while state.ready and state.operations.steps < (self.max_steps if self.in_order else 1):
            step = Step()
            items: list[StepItem] = []
            budget, self._short = state.settings.token_budget, False
            for request in sorted(self._requests.running, key=lambda request: request.order):
                if request.state is RequestState.RUNNING:  # an older one may have retracted it meanwhile
                    budget -= self._add(request, budget, step, items)
            budget = self._admit(budget, step, items)
            if not items:
                return
            loads = {load.op_id for request, _, _, _ in step.requests for load in request.loads}
            step.waits = bool(loads)
            before = 0
            for other in state.operations.live(Step) if state.operations.steps else ():
                before = max(before, other.op_id)
            message = RunStep(state.operations.new_id(), items, sorted(loads), before)
            state.operations.start(step, message, state.workers)

    def _admit(self, budget: int, step: Step, items: list[StepItem]) -> int:
        if budget <= 0 or len(self._requests.running) >= self._state.settings.max_running:
            return budget  # before the queue is looked at: it may hold a thousand requests
        states = (*WAITING, RequestState.PREFETCHING) if self._best_effort else WAITING
        everyone = self._requests.all.values()  # an adoption is waited for: it takes no longer than a message
        waiting = [each for each in everyone if each.state in states and type(each.fetch) is not Adopt]
        for request in sorted(waiting, key=lambda request: request.order):
            if budget <= 0 or len(self._requests.running) >= self._state.settings.max_running:
                break
            if request.state not in states or type(request.fetch) is Adopt:
                continue  # the end of an older one's prefetch has sent it to another lookup
            if not self.admit(request) and not self._admit_alone(request):
                break
            budget -= self._add(request, budget, step, items)
        return budget

    @property
    def _best_effort(self) -> bool:
        return self._state.settings.prefetch_policy == "best_effort"

    def _admit_alone(self, request: Request) -> bool:
        """Nothing runs, yet the memory is short: what was reserved for younger requests must go."""
        if self._requests.running or self._requests.draining or self._device.waits:
            return False
        self._prefetcher.dismiss_hungry()
        for other in self._requests.all.values():
            if other is not request:
                self._prefetcher.unreserve(other)
        admitted = self.admit(request)
        while not admitted and not self._device.waits and self._pins.give_way():
            admitted = self.admit(request)
        return admitted

    def admit(self, request: Request) -> bool:
        """Lock the request's path, start its loads, give it a row. False when the memory isn't there (yet)."""
        state = self._state
        self._device.waits = False
        if not self._requests.rows:
            return False
        if request.state is RequestState.PREFETCHING:
            self._prefetcher.expire(request)
        limit = (request.length - 1) // state.settings.page_size
        match = state.tree.match_prefix(request.seed, bytes(request.tokens), limit, request.priority)
        request.unloaded = load_refusal(state, request, match)
        to_load = match.host if request.unloaded is None else []
        path = match.device + to_load
        end = path[-1] if path else state.tree.top(match.end)
        lock = state.tree.lock(end)
        if not self._fits(request, match):
            state.unlock(lock)
            return False
        if to_load:
            pages = self._device.alloc(match.host_pages, request)
            if pages is None:  # backups come first
                state.unlock(lock)
                return False
            self._load_back.start(to_load, pages)
        self._prefetcher.unreserve(request)
        request.lock = lock
        self._place(request, match, path)
        return True

    def _fits(self, request: Request, match: Match) -> bool:
        """Is there room for the whole prompt and the next token, beside what the running ones still need?"""
        promised = sum(self._missing_pages(other) for other in self._requests.running)
        return self._device.has_room(self._missing_pages(request) - match.device_pages + promised)

    def _missing_pages(self, request: Request) -> int:
        pages = -(-(request.length + 1) // self._state.settings.page_size)
        return max(0, min(pages, self._state.device.total) - len(request.pages))

    def _place(self, request: Request, match: Match, path: list[Node]) -> None:
        state = self._state
        request.take_path(path, state.settings.page_size)
        request.loads = _loads(path)
        for load in request.loads:
            load.requests.add(request)
        request.row = self._requests.rows.pop()
        request.state, request.state_deadline = RequestState.RUNNING, float("inf")
        self._requests.running.append(request)
        if request.explained != request.load_failures:  # a load that failed has given nothing: hits are split anew
            request.explained = request.load_failures
            if request.unloaded is SLOW_LOAD:
                state.speeds.load.refused()
                state.counters["load_back_dropped_slower"] += match.host_pages
            request.hits = self._split_hits(request, match.device_pages)
            self._why.admitted(request, match)
        if request.started is None:
            request.started = state.now
            if state.reuse is not None:
                request.frequencies = state.reuse.observe(request.seed, bytes(request.tokens), state.tree.clock)
            hits = request.hits or (0, 0, 0)
            if state.window is not None:
                state.window.observe(request.seed, bytes(request.tokens), hits[0] + hits[1])
            for tier, tokens in zip(("device", "host", "storage"), hits, strict=True):
                state.counters[f"{tier}_hit_tokens"] += tokens
        if state.reuse is not None:
            mark(path, request.frequencies, state.tree.device_leaves)
        self._backup.count_hits(path, request.counted)
        request.counted = max(request.counted, request.shared)

    def _split_hits(self, request: Request, device: int) -> tuple[int, int, int]:
        """Tokens of the admitted path by tier; what L3 gave for this request counts as storage."""
        page_size, (first, last) = self._state.settings.page_size, request.prefetched
        limit = (request.prompt_tokens - 1) // page_size
        device, shared = min(device, limit), min(request.shared, limit)
        storage = max(0, min(last, shared) - max(first, device))
        return device * page_size, (shared - device - storage) * page_size, storage * page_size

    # --- one request's part of a step ---------------------------------------------------------------------------

    def _add(self, request: Request, budget: int, step: Step, items: list[StepItem]) -> int:
        """Add what fits of a running request; returns the tokens that it costs."""
        known = request.length - request.scheduled
        if known > 0 and request.in_flight:  # a prompt's chunks join the tree one by one
            return 0
        # A decode (one known token) isn't held up by a spent budget; nothing known: run ahead of the step in flight.
        count = self._runs_ahead(request) if known <= 0 else known if known == 1 else min(known, budget)
        if count <= 0 or (self._short and request.in_flight):
            return 0
        if not self._ensure_pages(request, request.scheduled + count):
            self._short = True
            return 0
        samples = request.scheduled + count >= request.length
        first = request.scheduled
        items.append(
            StepItem(
                row=request.row,
                start=first,
                tokens=bytes(request.tokens[4 * first : 4 * (first + count)]) if known > 0 else b"",
                first_page=request.synced,
                pages=pack(request.pages[request.synced :]),
                sampling=request.sampling if samples else None,
                history=request.history(first) if samples else b"",
                request_id=request.key.request_id,
            )
        )
        step.requests.append((request, request.attempt, count, samples))
        request.synced = len(request.pages)
        request.scheduled += count
        request.in_flight += 1
        return count

    def _runs_ahead(self, request: Request) -> int:
        """1 when a step in flight samples the token that comes next, and another may follow it.

        Not while computed pages of the prompt wait to join the tree, which takes a moment without a step in flight.
        """
        sampling = request.scheduled - request.length + 1
        more = request.in_flight > 0 and request.output_tokens + sampling < request.max_tokens
        return int(more and not request.has_new_pages(self._state.settings.page_size))

    def _ensure_pages(self, request: Request, tokens: int) -> bool:
        """Give the request pages for `tokens` tokens, retracting younger ones if need be."""
        missing = -(-tokens // self._state.settings.page_size) - len(request.pages)
        while missing > 0:
            pages = self._device.alloc(missing, request)
            if pages is not None:
                request.extend_pages(pages)
                return True
            if self._device.waits or not self._retract_younger(request):
                return False
        return True

    def _retract_younger(self, request: Request) -> bool:
        """Make the youngest request that came after `request` give its pages back. False when there is none."""
        younger = [other for other in self._requests.running if other.order > request.order and not other.in_flight]
        if younger:
            self._requests.stop(max(younger, key=lambda other: other.order))
            return True
        reserved = [other for other in self._requests.all.values() if other.reserved is not None]
        for other in reserved:
            self._prefetcher.unreserve(other)
        return self._prefetcher.dismiss_hungry() or bool(reserved) or self._pins.give_way()


def _loads(path: list[Node]) -> set[Load]:
    return {node.loading for node in path if node.loading is not None}
