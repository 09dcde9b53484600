"""Chooses tokens from logits. A row's choice depends on its own logits, parameters and position, on nothing else."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from shared.messages.worker import Sampling

CANDIDATES = 256  # top_p looks at so many of the most likely tokens first: they nearly always suffice, a sort is slow
MASK = 2**64 - 1
GOLDEN_GAMMA = 0x9E3779B97F4A7C15


class SampledToken(NamedTuple):
    """One row's token. Log-probabilities are natural, of the raw logits, before temperature."""

    token_id: int
    logprob: float
    top_ids: list[int]  # best first; empty unless asked for
    top_logprobs: list[float]


def uniform(seed: int, choice: int, position: int) -> float:
    """The random number in [0, 1) of a position: a hash, so that there is no generator whose state can be lost.

    SplitMix64's output function (Steele, Lea, Flood, 2014) over the three, one after the other.
    """
    state = 0
    for value in (seed, choice, position):
        state = _mix(state ^ (value & MASK))
    return (state >> 11) * 2.0**-53


@torch.inference_mode()
def sample(logits: torch.Tensor, params: Sequence[Sampling], positions: Sequence[int]) -> list[SampledToken]:
    """One token for each row of logits (float32 [n, vocab]); positions: where in its request each will stand.

    top_k is applied first, then top_p and min_p to what is left, as vLLM does. Raises ValueError for logits that
    aren't finite: the pass that made them was wrong.
    """
    normaliser = logits.logsumexp(-1)
    if not bool(normaliser.isfinite().all()):
        raise ValueError(f"logits of rows {(~normaliser.isfinite()).nonzero().flatten().tolist()} are not finite")
    chosen = logits.argmax(-1)
    for row, (wanted, position) in enumerate(zip(params, positions, strict=True)):
        if wanted.temperature > 0:
            chosen[row] = _draw(logits[row], wanted, uniform(wanted.seed, wanted.choice, position))
    logprobs = logits.gather(1, chosen[:, None])[:, 0] - normaliser
    tops = [_top(logits[row], normaliser[row], wanted.logprobs) for row, wanted in enumerate(params)]
    return [
        SampledToken(token_id, logprob, *top)
        for token_id, logprob, top in zip(chosen.tolist(), logprobs.tolist(), tops, strict=True)
    ]


def _draw(logits: torch.Tensor, params: Sampling, number: float) -> int:
    """The token at `number` of the way through the kept tokens' mass, in order of token id.

    In that order noise moves the borders by as much as itself; in order of likelihood it would swap near-equals.
    """
    weights = ((logits - logits.max()).double() / params.temperature).exp_()  # of the most likely token: 1
    if params.top_k or params.top_p < 1:
        weights = _keep_top(weights, params.top_k, params.top_p)
    if params.min_p > 0:
        weights = weights.where(weights >= params.min_p, 0.0)
    mass = weights.cumsum(0)
    token = int(torch.searchsorted(mass, number * float(mass[-1]), right=True))
    return min(token, int(weights.nonzero()[-1]))


def _keep_top(weights: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Weights with those outside top_k, and then outside top_p of what is left, set to 0."""
    vocab = len(weights)
    count = min(top_k or CANDIDATES, vocab)
    best, ids = weights.topk(count)
    whole = best.sum() if top_k else weights.sum()
    if not top_k and float(best.sum()) < top_p * float(whole):
        best, ids = weights.sort(descending=True)
    if top_p < 1:
        before = best.cumsum(0) - best
        kept = max(1, int((before < top_p * whole).sum()))
        best, ids = best[:kept], ids[:kept]
    return torch.zeros_like(weights).scatter_(0, ids, best)


def _top(logits: torch.Tensor, normaliser: torch.Tensor, count: int) -> tuple[list[int], list[float]]:
    if not count:
        return [], []
    best, ids = logits.topk(min(count, len(logits)))
    return ids.tolist(), (best - normaliser).tolist()


def _mix(value: int) -> int:
    value = (value + GOLDEN_GAMMA) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)
