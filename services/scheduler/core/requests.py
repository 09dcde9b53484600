"""Requests from Submit to their end (docs/architecture.md: A request)."""

from services.scheduler.core.device_memory import DeviceMemory
from services.scheduler.core.events import PeerKey
from services.scheduler.core.prefetch import Prefetcher
from services.scheduler.core.request import Request, RequestKey, RequestState
from services.scheduler.core.settings import WORKER_WAIT_S
from services.scheduler.core.state import State
from shared.messages.gateway import Finish, Reject, Submit, Usage
from shared.page_hash import namespace_seed


class Requests:
    """All requests, and who runs."""

    def __init__(self, state: State, device: DeviceMemory, prefetcher: Prefetcher) -> None:
        self._state = state
        self._device = device
        self._prefetcher = prefetcher
        self.all: dict[RequestKey, Request] = {}
        self.running: list[Request] = []  # RUNNING, in order of admission
        self.draining: set[Request] = set()
        self.early: dict[RequestKey, tuple[Submit, float]] = {}  # came before a worker was there; until when they wait
        self.rows: list[int] = []  # free rows of req_to_token
        self.max_context = 0  # tokens
        self._arrivals = 0

    def room(self) -> int:
        """Tokens of the longest prompt + output that can run."""
        return min(self.max_context, self._state.device.total * self._state.settings.page_size)

    def submit(self, gateway: PeerKey, submit: Submit) -> None:
        """Take a request, or refuse it with the reason."""
        key = RequestKey(gateway, submit.request_id)
        if key in self.all or key in self.early:
            return
        if not self.room() and len(self.early) < self._state.settings.max_queued:
            self.early[key] = (submit, self._state.now + min(WORKER_WAIT_S, submit.timeout_s))
            return
        refusal = self._refusal(submit)
        if refusal is not None:
            code, text = refusal
            self._state.counters[f"rejected_{code}"] += 1
            self._state.send(gateway, Reject(submit.request_id, code, text, code != 400))
            return
        names = submit.namespace
        seed = namespace_seed(names.tenant, names.lora_id, names.extra_key)
        self._arrivals += 1
        request = Request(key, submit, seed, self._arrivals, self._state.now)
        if not request.max_tokens:
            request.max_tokens = self.room() - request.prompt_tokens
        self.all[key] = request
        self._state.counters["requests"] += 1
        self._state.counters["prompt_tokens"] += request.prompt_tokens
        self._prefetcher.consider(request)

    def take_early(self) -> None:
        """A worker group is there: take the requests that came before it."""
        early, self.early = self.early, {}
        for key, (submit, _) in early.items():
            self.submit(key.gateway, submit)

    def _refuse_early(self, key: RequestKey, text: str) -> None:
        del self.early[key]
        self._state.counters["rejected_503"] += 1
        self._state.send(key.gateway, Reject(key.request_id, 503, text, True))

    def _refusal(self, submit: Submit) -> tuple[int, str] | None:
        tokens, room, limit = len(submit.tokens) // 4, self.room(), self._state.settings.max_queued
        if len(self.all) >= limit:
            return 429, f"{len(self.all)} requests are open, the limit is {limit}; retry later"
        if not room:
            return 503, "no GPU worker is ready yet; retry in a few seconds"
        if not tokens:
            return 400, "the prompt has no token; send at least one"
        if tokens + max(1, submit.max_tokens) > room:
            return 400, (
                f"prompt ({tokens} tokens) + max_tokens ({submit.max_tokens}) exceed {room} tokens, the smaller of "
                f"the context limit and the device pool; shorten one of them"
            )
        return None

    def abort(self, key: RequestKey) -> None:
        """End a request in any state; the gateway learns what it has cost."""
        early = self.early.pop(key, None)
        if early is not None:
            usage = Usage(len(early[0].tokens) // 4, 0, 0, 0, 0, 0, 0.0)
            self._state.send(key.gateway, Finish(key.request_id, "abort", usage))
        request = self.all.get(key)
        if request is not None:
            self._state.counters[f"abort_{request.state.value}"] += 1
            self._state.send(key.gateway, Finish(key.request_id, "abort", request.usage()))
            self._end(request)

    def reject_all(self, gateway: PeerKey) -> None:
        """The gateway is silent: its requests end. If it lives, it must hear that."""
        text = "the scheduler lost its link to the gateway; retry"
        for request in [request for key, request in self.all.items() if key.gateway == gateway]:
            self.reject(request, 503, text)
        for key in [key for key in self.early if key.gateway == gateway]:
            self._refuse_early(key, text)

    def reject(self, request: Request, code: int, text: str) -> None:
        """End a request without an answer; the same request may succeed later."""
        self._state.counters[f"rejected_{code}"] += 1
        self._state.send(request.key.gateway, Reject(request.key.request_id, code, text, True))
        self._end(request)

    def finish(self, request: Request, reason: str) -> None:
        """End a request with its last token."""
        self._state.counters["finished"] += 1
        self._state.counters["output_tokens"] += request.output_tokens
        self._state.send(request.key.gateway, Finish(request.key.request_id, reason, request.usage()))
        self._end(request)

    def _end(self, request: Request) -> None:
        del self.all[request.key]
        self._prefetcher.leave(request)
        self._prefetcher.unreserve(request)
        if request.row:
            self.stop(request)

    def stop(self, request: Request, *, trusted: bool = True) -> None:
        """Take a request from the device, now or when its last step in flight is in.

        What it has computed joins the tree when it can be trusted. A request that hasn't ended waits to be admitted
        again, prompt and output in one.
        """
        request.trusted = request.trusted and trusted
        if request.state is not RequestState.DRAINING:
            request.state = RequestState.DRAINING
            self.running.remove(request)
            self.draining.add(request)
        if not request.in_flight:
            self.drained(request)

    def drained(self, request: Request) -> None:
        """No step in flight touches the pages of a DRAINING request any more."""
        if request.trusted:
            self._device.cache_finished_req(request)
        else:
            self._state.device.free(request.own_pages)
        if request.lock is not None:
            lock, request.lock = request.lock, None
            self._state.unlock(lock)
        self._leave_device(request)

    def abandon(self, request: Request) -> None:
        """Leave the device without touching pages and lock: they are gone, or an operation in doubt has them now."""
        if request.state is RequestState.RUNNING:
            self.running.remove(request)
        request.lock = None
        self._leave_device(request)

    def _leave_device(self, request: Request) -> None:
        for load in request.loads:
            load.requests.discard(request)
        request.loads.clear()
        self.draining.discard(request)
        self.rows.append(request.row)
        request.leave_device()
        if request.key in self.all:
            request.state = RequestState.RETRACTED
            request.retracted += 1
            self._state.counters["retracted"] += 1

    def expire(self) -> None:
        """Act on the deadlines of requests that have passed."""
        for key in [key for key, (_, until) in self.early.items() if until <= self._state.now]:
            self._refuse_early(key, "no GPU worker is ready; retry in a few seconds")
        for request in list(self.all.values()):
            if request.deadline <= self._state.now:
                waited = self._state.now - request.arrived
                self.reject(request, 503, f"the request was not done within {waited:.0f} s; retry later")
            elif request.state_deadline <= self._state.now:
                self._prefetcher.expire(request)

    def next_deadline(self) -> float:
        """The earliest deadline of a request."""
        first = float("inf")
        for _, until in self.early.values():
            first = min(first, until)
        for request in self.all.values():
            first = min(first, min(request.deadline, request.state_deadline))
        return first
