"""RunStep: one forward pass on the compute stream, layer by layer behind the loads that it needs."""

import logging
import time
from collections.abc import Sequence

import numpy as np
import torch

from services.gpu_worker.kv_pool import KVPool
from services.gpu_worker.model.batch import ForwardBatch, Segment
from services.gpu_worker.model.llama import Llama
from services.gpu_worker.operations import Load, LoadFailed, Step
from services.gpu_worker.req_to_token import ReqToToken
from services.gpu_worker.sampling import Adjust, SampledToken, sample
from services.gpu_worker.sampling_grammar import Grammars
from services.gpu_worker.sampling_guide import SoFar, adjustment
from services.gpu_worker.transfers import RANK
from shared import test_hooks, tracing
from shared.errors import ProtocolError
from shared.messages.worker import RunStep, Sampled, StepDone, StepFailed, StepItem
from shared.packed import Ints, pack, unpack

LOAD_WAIT_S = 30.0  # what one step waits for its loads in all: 16 GiB at 0.5 GiB/s; beyond it recomputing is better

log = logging.getLogger("kvtide.stepper")


class LayerGate:
    """Holds the forward pass before each layer until all loads have that layer in."""

    def __init__(self, loads: Sequence[Load]) -> None:
        self._loads = loads
        self._deadline_s = time.monotonic() + LOAD_WAIT_S

    def __call__(self, layer: int) -> None:
        """Raises LoadFailed when a load has failed or takes too long."""
        test_hooks.reach("worker_step")
        for load in self._loads:
            try:
                load.layers[layer].wait(self._deadline_s - time.monotonic())
            except TimeoutError as error:
                raise LoadFailed(f"{error} (layer {layer})", [load.op_id]) from None
            except LoadFailed:
                failed = [each.op_id for each in self._loads if each.failed]
                raise LoadFailed(f"layer {layer} is not in", failed) from None


class Stepper:
    """The model, the page tables of its requests, and each request's last token."""

    def __init__(self, model: Llama, pool: KVPool, requests: ReqToToken, max_context: int, grammars: Grammars) -> None:
        """max_context: tokens of one request."""
        self._model = model
        self._pool = pool
        self._requests = requests
        self._max_context = max_context
        self._grammars = grammars
        self._vocabulary = model.config.vocab
        self._last_token: dict[int, int] = {}  # by row

    def run(self, step: Step) -> StepDone | StepFailed:
        """Run on the compute stream. Raises nothing: what goes wrong is in the answer.

        The page tables keep what the step gave them, even when it fails for want of a load.
        """
        started = time.perf_counter()
        try:
            sampled = self._run(step)
        except Exception as error:
            step.ended.set_error(error)
            step.begun.record()
            return _failed(step.op_id, error)
        step.ended.record()
        seconds = time.perf_counter() - started
        _tell(step.command, seconds)
        return StepDone(step.op_id, RANK, sampled, seconds)

    def _run(self, step: Step) -> list[Sampled]:
        items = step.command.items
        log.debug("step op_id=%d requests=%s", step.op_id, ",".join(item.request_id for item in items))
        batch = self._prepare(items)
        step.written = np.unique(batch.slots.numpy() // self._pool.page_size)
        step.begun.record()
        if step.lost:
            raise LoadFailed("a load had failed or was never seen", step.lost)
        logits = self._model.forward(batch, self._pool, LayerGate(step.loads))
        wanted = [(item, item.sampling) for item in items if item.sampling is not None]
        ends = [item.start + _count(item) for item, _ in wanted]
        guided = {row: self._adjustment(item) for row, (item, sampling) in enumerate(wanted) if sampling.guide}
        tokens = sample(logits, [sampling for _, sampling in wanted], ends, guided)
        for (item, _), token in zip(wanted, tokens, strict=True):
            self._last_token[item.row] = token.token_id
        return [_sampled(item.row, token) for (item, _), token in zip(wanted, tokens, strict=True)]

    def _adjustment(self, item: StepItem) -> Adjust:
        assert item.sampling is not None
        assert item.sampling.guide is not None
        history = unpack(item.history)
        so_far = SoFar(item.start - len(history), np.concatenate([history, self._tokens(item)]))
        return adjustment(item.row, item.sampling.guide, so_far, self._grammars)

    def _prepare(self, items: Sequence[StepItem]) -> ForwardBatch:
        """Update the page tables and lay the items side by side. Raises ProtocolError for what makes no sense."""
        if not items or len({item.row for item in items}) != len(items):
            raise ProtocolError(f"a step needs items, each of another row; got {[item.row for item in items]}")
        tokens = [self._tokens(item) for item in items]
        pages = [self._pages(item) for item in items]
        for item, given in zip(items, pages, strict=True):
            self._requests.write_pages(item.row, item.first_page, torch.from_numpy(given.astype(np.int64)))
        segments, slots, start = [], [], 0
        for item, ids in zip(items, tokens, strict=True):
            stop = item.start + len(ids)
            table = self._requests.page_table(item.row, stop)
            if not table.all():
                raise ProtocolError(f"row {item.row} has no page for each of its {stop} tokens; send the pages first")
            segments.append(Segment(start, len(ids), item.start, table))
            slots.append(self._requests.slots(item.row, item.start, stop))
            start += len(ids)
        ends = [segment.start + segment.tokens - 1 for segment in segments]
        sample_rows = [end for item, end in zip(items, ends, strict=True) if item.sampling is not None]
        positions = [torch.arange(item.start, item.start + len(ids)) for item, ids in zip(items, tokens, strict=True)]
        return ForwardBatch(
            token_ids=torch.from_numpy(np.concatenate(tokens).astype(np.int64)),
            positions=torch.cat(positions),
            slots=torch.cat(slots),
            segments=segments,
            sample_rows=torch.tensor(sample_rows, dtype=torch.int64),
        )

    def _tokens(self, item: StepItem) -> Ints:
        """The item's token ids; the row's last token where none is given."""
        if not 1 <= item.row < len(self._requests.table):
            raise ProtocolError(f"row {item.row} is outside 1..{len(self._requests.table) - 1}")
        if item.tokens:
            tokens = unpack(item.tokens)
        elif item.row in self._last_token:
            tokens = np.array([self._last_token[item.row]], dtype=np.int32)
        else:
            raise ProtocolError(f"row {item.row} has sampled no token yet; send one")
        if tokens.min() < 0 or tokens.max() >= self._vocabulary:
            raise ProtocolError(f"token {tokens.min()} or {tokens.max()} is outside 0..{self._vocabulary - 1}")
        if item.start < 0 or item.start + len(tokens) > self._max_context:
            raise ProtocolError(f"{len(tokens)} tokens at {item.start} are outside a context of {self._max_context}")
        return tokens

    def _pages(self, item: StepItem) -> Ints:
        pages = unpack(item.pages)
        if len(pages) and (pages.min() < 1 or pages.max() >= self._pool.pages):
            raise ProtocolError(f"page {pages.min()} or {pages.max()} is outside 1..{self._pool.pages - 1}")
        if item.first_page < 0 or item.first_page + len(pages) > self._requests.pages_per_row:
            raise ProtocolError(f"{len(pages)} pages at {item.first_page} don't fit {self._requests.pages_per_row}")
        return pages


def _tell(command: RunStep, seconds: float) -> None:
    """A line and spans for the prompts of a step; steps that only decode are for `debug`."""
    prompts = [item for item in command.items if _count(item) > 1]
    if prompts:
        names = ",".join(item.request_id for item in prompts)
        tokens = sum(map(_count, prompts))
        log.info("prefill op_id=%d requests=%s tokens=%d seconds=%.6f", command.op_id, names, tokens, seconds)
    for item in prompts:
        attributes = {"kvtide.op_id": command.op_id, "kvtide.start": item.start, "kvtide.tokens": _count(item)}
        tracing.record("prefill", item.request_id, seconds, **attributes)


def _count(item: StepItem) -> int:
    return len(unpack(item.tokens)) or 1


def _sampled(row: int, token: SampledToken) -> Sampled:
    top_logprobs = np.array(token.top_logprobs, dtype="<f4").tobytes()
    return Sampled(row, token.token_id, token.logprob, pack(token.top_ids), top_logprobs)


def _failed(op_id: int, error: Exception) -> StepFailed:
    if isinstance(error, LoadFailed):
        log.warning("step_failed op_id=%d reason=load loads=%s error=%s", op_id, error.op_ids, error)
        return StepFailed(op_id, RANK, "load", list(error.op_ids))
    reason = "memory" if _is_out_of_memory(error) else "error"
    log.error("step_failed op_id=%d reason=%s", op_id, reason, exc_info=error)
    return StepFailed(op_id, RANK, reason, [])


def _is_out_of_memory(error: Exception) -> bool:
    # On a CPU torch raises a plain RuntimeError with this text.
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
