"""Sampling: the kept mass, the distribution, and that nothing but (seed, choice, position) moves a draw."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.gpu_worker import sampling
from services.gpu_worker.sampling import sample, uniform
from shared.messages.worker import Sampling


def params(**changes: Any) -> Sampling:
    plain = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 0, "choice": 0, "logprobs": 0}
    return Sampling(**{**plain, **changes})


def draws(probabilities: list[float], count: int, **changes: Any) -> np.ndarray:
    """How often each token came in `count` positions."""
    logits = torch.tensor(probabilities).log().expand(count, -1)
    tokens = [t.token_id for t in sample(logits, [params(**changes)] * count, range(count))]
    return np.bincount(tokens, minlength=len(probabilities))


def test_uniform_is_splitmix_and_spreads() -> None:
    assert sampling._mix(0) == 0xE220A8397B1DCDAF  # the first output of SplitMix64 with seed 0
    numbers = np.array([uniform(seed, choice, i) for seed in (0, 1, 2**63) for choice in (0, 1) for i in range(1000)])
    assert len(set(numbers)) == 6000
    assert 0 <= numbers.min() < 0.002
    assert 0.998 < numbers.max() < 1
    counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
    assert ((counts - 300) ** 2 / 300).sum() < 45  # chi-square, 19 degrees of freedom: p = 0.0007


def test_greedy_takes_the_maximum_and_does_not_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_draw", None)
    monkeypatch.setattr(torch.Tensor, "topk", None)
    logits = torch.randn(5, 100, generator=torch.Generator().manual_seed(0))
    found = sample(logits, [params(temperature=0.0, top_p=0.5, top_k=3)] * 5, range(5))
    assert [t.token_id for t in found] == logits.argmax(-1).tolist()


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1)) * 4
    wanted = [params(temperature=0.0), params(temperature=3.0, top_k=5, logprobs=4), params(logprobs=99)]
    found = sample(logits, wanted, [7, 8, 9])
    expected = logits.log_softmax(-1)
    for row, token in enumerate(found):
        assert token.logprob == pytest.approx(float(expected[row, token.token_id]), abs=1e-5)
        count = min(wanted[row].logprobs, 50)
        best = expected[row].sort(descending=True)
        assert token.top_ids == best.indices[:count].tolist()
        assert token.top_logprobs == pytest.approx(best.values[:count].tolist(), abs=1e-5)


def test_the_distribution_is_the_softmax() -> None:
    probabilities = [0.4, 0.3, 0.2, 0.05, 0.05]
    counts = draws(probabilities, 4000, seed=3)
    expected = 4000 * np.array(probabilities)
    assert ((counts - expected) ** 2 / expected).sum() < 20  # chi-square, 4 degrees of freedom: p = 0.0005
    cooled = np.array(probabilities) ** 2 / (np.array(probabilities) ** 2).sum()
    counts = draws(probabilities, 4000, seed=3, temperature=0.5)
    assert ((counts - 4000 * cooled) ** 2 / (4000 * cooled)).sum() < 20


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({"top_k": 2}, [1, 2]),
        ({"top_k": 99}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.69}, [1, 2]),
        ({"top_p": 0.71}, [0, 1, 2]),
        ({"top_p": 0.0}, [1]),
        ({"min_p": 0.45}, [0, 1, 2]),
        ({"min_p": 1.0}, [1]),
        ({"top_k": 3, "top_p": 0.75}, [1, 2]),  # of what top_k leaves, 0.7 of 0.9 is 0.78
        ({"top_k": 3, "min_p": 0.7}, [1, 2]),
        ({"temperature": 1e-4}, [1]),
        ({"temperature": 1e-99}, [1]),
        ({"temperature": 2e-6}, [1]),
    ],
)
def test_filters_keep_what_they_should(changes: dict[str, Any], kept: list[int]) -> None:
    counts = draws([0.2, 0.4, 0.3, 0.06, 0.04], 600, **changes)
    assert np.flatnonzero(counts).tolist() == kept


@pytest.mark.parametrize("spread", [0.1, 3.0])
def test_top_p_keeps_the_smallest_set_with_that_mass(spread: float) -> None:
    weights = np.exp(np.random.default_rng(2).normal(0, spread, 2000)).astype(np.float32)
    weights /= weights.sum()
    kept = sampling._keep_top(weights, top_k=0, top_p=0.8)
    chosen = kept > 0
    np.testing.assert_array_equal(kept[chosen], weights[chosen])
    mass = weights[chosen].sum(dtype=np.float64)
    assert mass - weights[chosen].min() < 0.8 <= mass + 1e-6
    assert weights[chosen].min() >= weights[~chosen].max()


def test_of_equal_tokens_the_first_are_kept() -> None:
    weights = np.array([0.5, 1, 0.5, 0.5, 1, 0.5], dtype=np.float32)
    assert np.flatnonzero(sampling._keep_top(weights, top_k=3, top_p=1.0)).tolist() == [0, 1, 4]
    assert np.flatnonzero(sampling._keep_top(weights, top_k=0, top_p=0.6)).tolist() == [0, 1, 4]
    assert np.flatnonzero(sampling._keep_top(weights, top_k=1, top_p=1.0)).tolist() == [1]


@given(seed=st.integers(0, 2**64 - 1), choice=st.integers(0, 7), position=st.integers(0, 10**6))
def test_a_draw_depends_on_nothing_else(seed: int, choice: int, position: int) -> None:
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(5))
    mine = params(seed=seed, choice=choice, top_p=0.9)
    alone = sample(logits[2:3], [mine], [position])[0].token_id
    others = [params(temperature=0.0), params(seed=1), mine, params(top_k=3, logprobs=2)]
    assert sample(logits, others, [1, 2, position, 4])[2].token_id == alone


def test_seed_choice_and_position_each_move_the_draw() -> None:
    logits = torch.zeros(64, 1000)
    base = [t.token_id for t in sample(logits, [params()] * 64, range(64))]
    assert len(set(base)) > 50
    for other, positions in ((params(seed=1), range(64)), (params(choice=1), range(64)), (params(), range(64, 128))):
        moved = [t.token_id for t in sample(logits, [other] * 64, positions)]
        assert sum(a == b for a, b in zip(base, moved, strict=True)) < 5


def test_noise_below_the_borders_does_not_change_draws() -> None:
    """Two equally likely tokens may swap ranks; the draw goes by token id and stays."""
    logits = torch.zeros(200, 50)
    noisy = logits + 1e-6 * torch.randn(200, 50, generator=torch.Generator().manual_seed(0))
    wanted = [params(seed=9, min_p=0.5)] * 200
    first, second = (sample(x, wanted, range(200)) for x in (logits, noisy))
    assert sum(a.token_id != b.token_id for a, b in zip(first, second, strict=True)) == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_refused(bad: float) -> None:
    logits = torch.zeros(3, 10)
    logits[1, 4] = bad
    with pytest.raises(ValueError, match=r"rows \[1\] are not finite"):
        sample(logits, [params()] * 3, range(3))


def test_no_rows_is_fine() -> None:
    assert sample(torch.empty(0, 10), [], []) == []


def test_masked_tokens_never_come() -> None:
    logits = torch.full((300, 10), float("-inf"))
    logits[:, 3] = logits[:, 6] = 0.0
    assert {t.token_id for t in sample(logits, [params(top_p=0.99)] * 300, range(300))} == {3, 6}
