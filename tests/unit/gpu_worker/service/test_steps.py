"""RunStep: what the worker computes is what a model without a cache computes."""

from pathlib import Path

import numpy as np
import pytest
import torch

from shared.messages.worker import RunStep, Sampled, StepDone, StepFailed
from tests.unit.gpu_worker.service.dense_llama import dense_logprobs
from tests.unit.gpu_worker.service.fake_scheduler import VOCABULARY, Stack, item

PROMPT = [5, 17, 3, 88, 41, 60, 2, 9, 33, 70]


def distribution(sampled: Sampled) -> np.ndarray:
    """float32 [vocabulary]: all log-probabilities by token id."""
    values = np.empty(VOCABULARY, np.float32)
    values[np.frombuffer(sampled.top_ids, "<i4")] = np.frombuffer(sampled.top_logprobs, "<f4")
    return values


def assert_right(sampled: Sampled, expected: torch.Tensor) -> None:
    np.testing.assert_allclose(distribution(sampled), expected.numpy(), atol=1e-4)
    assert sampled.token == int(expected.argmax())
    assert sampled.logprob == pytest.approx(float(expected.max()), abs=1e-4)


async def test_chunked_prefill_and_decode_equal_a_dense_forward(stack: Stack, model_folder: Path) -> None:
    first = await stack.step([item(0, PROMPT[:6], [7, 3], sample=False)])
    assert first.sampled == []
    second = await stack.step([item(6, PROMPT[6:], [9], first_page=2)])
    tokens = list(PROMPT)
    [sampled] = second.sampled
    for pages in ([], [], [5], []):
        assert_right(sampled, dense_logprobs(model_folder, tokens)[-1])
        tokens.append(sampled.token)
        done = await stack.step([item(len(tokens) - 1, [], pages, first_page=3)])
        [sampled] = done.sampled
    assert_right(sampled, dense_logprobs(model_folder, tokens)[-1])


async def test_a_batch_of_prefill_and_decode_keeps_requests_apart(stack: Stack, model_folder: Path) -> None:
    other = [1, 2, 3, 4, 5]
    [one] = (await stack.step([item(0, PROMPT, [1, 2, 3], row=1)])).sampled
    done = await stack.step([item(0, other, [4, 5], row=3), item(len(PROMPT), [], [], row=1, first_page=3)])
    assert [sampled.row for sampled in done.sampled] == [3, 1]
    assert_right(done.sampled[0], dense_logprobs(model_folder, other)[-1])
    assert_right(done.sampled[1], dense_logprobs(model_folder, [*PROMPT, one.token])[-1])


async def test_a_row_gets_other_pages_when_the_tree_had_the_same_ones(stack: Stack, model_folder: Path) -> None:
    """cache_unfinished_req puts the tree's pages in place of the request's duplicates."""
    await stack.step([item(0, PROMPT[:8], [1, 2], row=2, sample=False)])
    await stack.step([item(0, PROMPT[:8], [3, 4], row=1, sample=False)])
    stack.fill([3, 4])
    done = await stack.step([item(8, PROMPT[8:], [1, 2, 5], row=1)])
    assert_right(done.sampled[0], dense_logprobs(model_folder, PROMPT)[-1])


@pytest.mark.parametrize(
    "bad",
    [
        item(0, [1], [1], row=0),
        item(0, [1], [1], row=5),
        item(0, [1], [0]),
        item(0, [1], [65]),
        item(0, [96], [1]),
        item(0, [-1], [1]),
        item(0, [1, 2, 3, 4, 5], [1]),
        item(255, [1, 2], [2], first_page=63),
        item(0, [], [1], row=4),
    ],
    ids=[
        "padding row",
        "row too large",
        "padding page",
        "page too large",
        "token too large",
        "token below zero",
        "page missing",
        "beyond the context",
        "no token to take",
    ],
)
async def test_a_step_that_makes_no_sense_fails_and_harms_nothing(stack: Stack, model_folder: Path, bad) -> None:
    scheduler = stack.scheduler
    before = [buffer.clone() for buffer in stack.engine.pool.layer_buffers(0)]
    failed = await scheduler.ask(RunStep(scheduler.op(), [bad], []))
    assert failed == StepFailed(failed.op_id, 0, "error", [])
    for old, new in zip(before, stack.engine.pool.layer_buffers(0), strict=True):
        assert torch.equal(old[4:], new[4:])
    done = await stack.step([item(0, PROMPT, [1, 2, 3])])
    assert_right(done.sampled[0], dense_logprobs(model_folder, PROMPT)[-1])


async def test_a_repeated_step_is_answered_and_not_computed_again(stack: Stack) -> None:
    scheduler = stack.scheduler
    command = RunStep(scheduler.op(), [item(0, PROMPT, [1, 2, 3])], [])
    first = await scheduler.ask(command)
    stack.fill([1, 2, 3])
    kept = stack.bytes_of(1)
    again = await scheduler.ask(command)
    assert isinstance(first, StepDone)
    assert again == first
    assert stack.bytes_of(1) == kept


async def test_memory_that_runs_out_fails_the_step_by_its_name(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("on purpose")

    monkeypatch.setattr(stack.engine.stepper._model, "forward", forward)
    scheduler = stack.scheduler
    failed = await scheduler.ask(RunStep(scheduler.op(), [item(0, PROMPT, [1, 2, 3])], []))
    assert failed == StepFailed(failed.op_id, 0, "memory", [])


async def test_a_step_that_builds_on_one_that_was_never_seen_is_refused_untouched(
    stack: Stack, model_folder: Path
) -> None:
    scheduler = stack.scheduler
    await stack.step([item(0, PROMPT, [1, 2, 3])])
    kept = [stack.bytes_of(page) for page in (1, 2, 3, 4)]
    lost = scheduler.op()
    ahead = RunStep(scheduler.op(), [item(len(PROMPT), [], [4], first_page=3)], [], after=lost)
    assert await scheduler.ask(ahead) == StepFailed(ahead.op_id, 0, "order", [])
    behind = RunStep(scheduler.op(), [item(len(PROMPT) + 1, [], [], first_page=4)], [], after=ahead.op_id)
    assert await scheduler.ask(behind) == StepFailed(behind.op_id, 0, "order", [])
    assert [stack.bytes_of(page) for page in (1, 2, 3, 4)] == kept
    found = await scheduler.ask(RunStep(lost, [item(0, PROMPT, [1, 2, 3])], []))
    assert isinstance(found, StepDone)
    assert_right(found.sampled[0], dense_logprobs(model_folder, PROMPT)[-1])


async def test_a_step_ahead_takes_the_token_of_the_one_in_flight(stack: Stack, model_folder: Path) -> None:
    scheduler = stack.scheduler
    first = RunStep(scheduler.op(), [item(0, PROMPT, [1, 2, 3])], [])
    ahead = RunStep(scheduler.op(), [item(len(PROMPT), [], [4], first_page=3)], [], after=first.op_id)
    scheduler.tell(first)
    scheduler.tell(ahead)
    token = (await scheduler.answer(first.op_id)).sampled[0].token
    done = await scheduler.answer(ahead.op_id)
    assert_right(done.sampled[0], dense_logprobs(model_folder, [*PROMPT, token])[-1])
