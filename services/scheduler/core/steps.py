"""What the end of a step means for its requests."""

import struct
from collections import defaultdict

from services.scheduler.core.device_memory import DeviceMemory
from services.scheduler.core.events import PeerKey
from services.scheduler.core.operations import Held, Step
from services.scheduler.core.request import Request, RequestState
from services.scheduler.core.requests import Requests
from services.scheduler.core.settings import MAX_STEP_FAILURES
from services.scheduler.core.state import State
from shared.messages.gateway import Emission, EmitTokens
from shared.messages.worker import Sampled
from shared.packed import pack


class Steps:
    """Follows RunStep commands to their end."""

    def __init__(self, state: State, requests: Requests, device: DeviceMemory) -> None:
        self._state = state
        self._requests = requests
        self._device = device

    def done(self, step: Step, sampled: list[Sampled]) -> None:
        """StepDone of all ranks: tokens to the gateways, pages to the tree."""
        by_row = {result.row: result for result in sampled}
        if any(samples and r.attempt == attempt and r.row not in by_row for r, attempt, _, samples in step.requests):
            self.failed(step, "error")  # an answer without the tokens that were asked for
            return
        emissions: dict[PeerKey, list[Emission]] = defaultdict(list)
        ended: list[tuple[Request, str]] = []
        for request, attempt, count, samples in step.requests:
            if request.attempt != attempt:
                continue
            row = request.row
            request.in_flight -= 1
            if self._overtook(step, request, attempt):
                self._requests.stop(request, trusted=False)
                continue
            request.computed += count
            if request.state is RequestState.DRAINING:
                if not request.in_flight:
                    self._requests.drained(request)
                continue
            request.step_failures = 0
            if samples:
                emissions[request.key.gateway].append(self._emit(request, by_row[row]))
                reason = _end_reason(request, by_row[row].token)
                if reason is not None:
                    ended.append((request, reason))
                    continue
            if not request.in_flight and request.has_new_pages(self._state.settings.page_size):
                self._device.cache_unfinished_req(request)
        for gateway, batch in emissions.items():
            self._state.send(gateway, EmitTokens(batch))
        for request, reason in ended:
            self._requests.finish(request, reason)

    def _overtook(self, step: Step, request: Request, attempt: int) -> bool:
        """Has an earlier step of the request no answer yet? Then one of its messages was lost, or it ran too late."""
        return request.in_flight > 0 and any(
            other.op_id < step.op_id and other.names(request, attempt) for other in self._state.operations.live(Step)
        )

    def _emit(self, request: Request, result: Sampled) -> Emission:
        token = pack([result.token])
        request.tokens += token
        request.output_tokens += 1
        return Emission(
            request.key.request_id,
            token,
            struct.pack("<f", result.logprob),
            [result.top_ids],
            [result.top_logprobs],
        )

    def failed(self, step: Step, reason: str) -> None:
        """A step has ended without result: its requests compute the same again, a bounded number of times."""
        self._state.counters[f"step_failed_{reason}"] += 1
        for request, attempt, _, _ in step.requests:
            if request.attempt != attempt:
                continue
            request.in_flight -= 1
            request.step_failures += reason not in ("load", "order")  # its load's end, or the lost step's, decides
            if request.in_flight:  # a later step was built on this one
                request.trusted = False
            if request.state is RequestState.DRAINING:
                if not request.in_flight:
                    self._requests.drained(request)
            elif request.step_failures >= MAX_STEP_FAILURES:
                text = (
                    f"the model failed {request.step_failures} times on this request ({reason}); see the worker's log"
                )
                self._requests.reject(request, 503, text)
            elif request.in_flight:
                self._requests.stop(request, trusted=False)
            else:
                request.rewind()

    def in_doubt(self, step: Step) -> None:
        """The worker is lost in mid-step: the step keeps its requests' pages and locks."""
        for request, attempt, _, _ in step.requests:
            if request.attempt == attempt:
                step.held.append(Held(request, attempt, request.own_pages, request.lock))
                self._requests.abandon(request)

    def settle(self, step: Step) -> None:
        """No worker touches the pages of a step in doubt any more, unless another step of the request is in flight:
        a fence drops a step that hasn't begun before it ends the one that runs."""
        steps = [each for each in self._state.operations.table.values() if isinstance(each, Step) and each is not step]
        held, step.held = step.held, []
        for each in held:
            heir = next((other for other in steps if other.names(each.request, each.attempt)), None)
            if heir is not None:
                heir.held.append(each)
            else:
                self._release(each)

    def forget(self, step: Step) -> None:
        """The device memory is gone, whoever still computes."""
        held, step.held = step.held, []
        for each in held:
            self._release(each)

    def _release(self, held: Held) -> None:
        self._state.device.free(held.pages)
        if held.lock is not None:
            self._state.unlock(held.lock)


def _end_reason(request: Request, token: int) -> str | None:
    if token in request.stop_token_ids:
        return "stop"
    return "length" if request.output_tokens >= request.max_tokens else None
