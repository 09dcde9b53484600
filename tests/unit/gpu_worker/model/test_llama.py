"""The forward pass equals itself however tokens are cut, batched and placed."""

import numpy as np
import pytest
import torch

from services.gpu_worker.model.batch import ForwardBatch, Segment
from services.gpu_worker.model.llama import Llama
from services.gpu_worker.model.score import score_tokens
from tests.unit.gpu_worker.model.paged import CLOSE, PAGE, POOL_PAGES, Engine, random_ids


@pytest.mark.parametrize("borders", [[8, 16, 40], [1, 2, 3, 4, 5, 40], [3, 10, 37, 39, 40], list(range(1, 41))])
def test_chunks_on_scattered_pages_equal_one_cold_prefill(tiny: Llama, borders: list[int]) -> None:
    ids = random_ids(40)
    engine = Engine(tiny)
    expected = engine.cold(ids)
    torch.testing.assert_close(engine.in_steps(ids, borders), expected, **CLOSE)


def test_requests_in_one_batch_do_not_touch_each_other(tiny: Llama) -> None:
    engine = Engine(tiny)
    requests = [random_ids(n, seed=n) for n in (5, 17, 9, 12)]
    alone = [engine.cold(ids) for ids in requests]
    tables = [engine.pages(len(ids)) for ids in requests]
    for ids, pages, upto in zip(requests[:3], tables, (4, 10, 8), strict=False):
        engine.step([(ids[:upto], 0, pages)])
    parts = [  # decode, chunk, decode, cold prompt
        (requests[0][4:], 4, tables[0]),
        (requests[1][10:], 10, tables[1]),
        (requests[2][8:], 8, tables[2]),
        (requests[3], 0, tables[3]),
    ]
    expected = torch.cat([logits[prefix:] for logits, (_, prefix, _) in zip(alone, parts, strict=True)])
    torch.testing.assert_close(engine.step(parts), expected, **CLOSE)


def test_consecutive_pages_are_read_in_place_with_the_same_bits(tiny: Llama) -> None:
    ids = random_ids(30)
    engine = Engine(tiny)
    scattered = [40, 7, 21, 3, 55, 30, 11, 60]
    found = [engine.step([(ids[:20], 0, p)]) for p in (scattered, list(range(12, 20)))]
    found += [engine.step([(ids[20:21], 20, p)]) for p in (scattered, list(range(12, 20)))]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[2], found[3])


def test_a_layer_waits_for_its_prefix(tiny: Llama) -> None:
    """The prefix arrives layer by layer, each just before that layer's attention."""
    ids = random_ids(20)
    engine = Engine(tiny)
    pages, elsewhere = engine.pages(20), engine.pages(20)
    expected = engine.step([(ids, 0, elsewhere)])[12:]
    copied = []

    def load_layer(layer: int) -> None:
        for buffer in engine.pool.layer_buffers(layer):
            by_page = buffer.view(POOL_PAGES, PAGE, *buffer.shape[1:])
            by_page[pages[:3]] = by_page[elsewhere[:3]]
        copied.append(layer)

    found = engine.step([(ids[12:], 12, pages)], load_layer)
    assert copied == [0, 1, 2]
    torch.testing.assert_close(found, expected, **CLOSE)


def test_what_before_layer_raises_ends_the_pass(tiny: Llama) -> None:
    seen = []

    def fail(layer: int) -> None:
        seen.append(layer)
        if layer == 1:
            raise LookupError("the load failed")

    with pytest.raises(LookupError, match="the load failed"):
        Engine(tiny).step([([1, 2, 3], 0, [1])], fail)
    assert seen == [0, 1]


def test_only_sampled_rows_have_logits(tiny: Llama) -> None:
    engine = Engine(tiny)
    at = torch.arange(6)
    batch = ForwardBatch(at, at, at + PAGE, [Segment(0, 6, 0, torch.tensor([1, 2]))], torch.tensor([5, 2]))
    expected = engine.cold(list(range(6)))[[5, 2]]
    torch.testing.assert_close(tiny.forward(batch, engine.pool), expected, **CLOSE)
    nothing = batch._replace(sample_rows=torch.empty(0, dtype=torch.int64))
    assert tiny.forward(nothing, engine.pool).shape == (0, 97)


def test_score_tokens_is_the_log_softmax_of_a_cold_prefill(tiny: Llama) -> None:
    ids = random_ids(90)
    logits = Engine(tiny).cold(ids)
    for first in (1, 50, 89, 90):
        gap, logprob = score_tokens(tiny, ids, first)
        rows, wanted = logits[first - 1 : -1], torch.tensor(ids[first:])
        chosen = rows.gather(1, wanted[:, None])[:, 0]
        np.testing.assert_allclose(gap, (rows.amax(1) - chosen).numpy(), atol=1e-4)
        np.testing.assert_allclose(logprob, (chosen - rows.logsumexp(1)).numpy(), atol=1e-4)
        assert gap.dtype == logprob.dtype == np.float32
        assert gap.shape == logprob.shape == (90 - first,)
    assert [scores.shape for scores in score_tokens(tiny, [5], 1)] == [(0,), (0,)]


@pytest.mark.parametrize("first", [0, 4])
def test_score_tokens_refuses_positions_without_a_prediction(tiny: Llama, first: int) -> None:
    with pytest.raises(ValueError, match=f"first is {first}"):
        score_tokens(tiny, [1, 2, 3], first)


def test_greedy_output_scores_zero_and_a_wrong_page_shows(tiny: Llama) -> None:
    engine = Engine(tiny)
    ids, pages = random_ids(16), engine.pages(24)
    logits = engine.step([(ids, 0, pages)])
    for position in range(16, 24):
        ids.append(int(logits[-1].argmax()))
        logits = engine.step([(ids[position:], position, pages)])
    assert score_tokens(tiny, ids, 16)[0].max() < 1e-3
    wrong = engine.step([(ids[-1:], 23, [pages[0], *engine.pages(1), *pages[2:]])])
    assert (wrong - logits).abs().max() > 0.01
