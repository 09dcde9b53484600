"""Chooses tokens from logits. A row's choice depends on its own logits, parameters and position, on nothing else."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from shared.messages.worker import Sampling

CANDIDATES = 256  # top_p sorts so many of the most likely tokens first: they nearly always suffice, a row is slower
COLDEST = 1e-6  # a temperature below leaves no token but the most likely: greedy
MASK = 2**64 - 1
GOLDEN_GAMMA = 0x9E3779B97F4A7C15

Row = npt.NDArray[np.float32]
Adjust = Callable[[Row], Row]
NO_ADJUSTMENTS: Mapping[int, Adjust] = MappingProxyType({})


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
def sample(
    logits: torch.Tensor,
    params: Sequence[Sampling],
    positions: Sequence[int],
    adjustments: Mapping[int, Adjust] = NO_ADJUSTMENTS,
) -> list[SampledToken]:
    """One token for each row of logits (float32 [n, vocab]); positions: where in its request each will stand.

    adjustments: by row, what penalties, biases and a grammar make of a copy of its logits. top_k is applied next, then
    top_p and min_p to what is left. Raises ValueError for logits that aren't finite: the pass that made them was wrong.
    """
    normaliser = logits.logsumexp(-1)
    if not bool(normaliser.isfinite().all()):
        raise ValueError(f"logits of rows {(~normaliser.isfinite()).nonzero().flatten().tolist()} are not finite")
    chosen = logits.argmax(-1)
    for row, (wanted, position) in enumerate(zip(params, positions, strict=True)):
        adjust, greedy = adjustments.get(row), wanted.temperature <= COLDEST
        if greedy and adjust is None:
            continue
        own = logits[row].cpu().numpy()
        if adjust is not None:
            own = adjust(own.copy())
        number = uniform(wanted.seed, wanted.choice, position)
        chosen[row] = int(own.argmax()) if greedy else _draw(own, wanted, number)
    logprobs = logits.gather(1, chosen[:, None])[:, 0] - normaliser
    tops = [_top(logits[row], normaliser[row], wanted.logprobs) for row, wanted in enumerate(params)]
    return [
        SampledToken(token_id, logprob, *top)
        for token_id, logprob, top in zip(chosen.tolist(), logprobs.tolist(), tops, strict=True)
    ]


def _draw(logits: Row, params: Sampling, number: float) -> int:
    """The token at `number` of the way through the kept tokens' mass, in order of token id.

    In that order noise moves the borders by as much as itself; in order of likelihood it would swap near-equals.
    """
    weights = np.exp((logits - logits.max()) / np.float32(params.temperature))  # of the most likely token: 1
    if params.top_k or params.top_p < 1:
        weights = _keep_top(weights, params.top_k, params.top_p)
    if params.min_p > 0:
        weights = np.where(weights >= params.min_p, weights, 0)
    mass = _running_sum(weights)
    token = int(np.searchsorted(mass, number * mass[-1], side="right"))
    return min(token, int(np.flatnonzero(weights)[-1]))


def _keep_top(weights: Row, top_k: int, top_p: float) -> Row:
    """Weights with those outside top_k, and then outside top_p of what is left, set to 0; of equals the first stay."""
    best = _highest(weights, top_k or CANDIDATES)
    whole = float((best if top_k else weights).sum(dtype=np.float64))
    if not top_k and float(best.sum(dtype=np.float64)) < top_p * whole:
        best = _highest(weights, len(weights))
    if top_p < 1:
        before = _running_sum(best) - best
        best = best[: max(1, int((before < top_p * whole).sum()))]
    kept = weights >= best[-1]
    surplus = int(kept.sum()) - len(best)
    if surplus:
        kept[np.flatnonzero(weights == best[-1])[-surplus:]] = False
    return np.where(kept, weights, 0)


def _highest(weights: Row, count: int) -> Row:
    """The `count` highest, in descending order."""
    if count < len(weights):
        return torch.from_numpy(weights).topk(count).values.numpy()
    return np.sort(weights)[::-1]


def _running_sum(weights: Row) -> npt.NDArray[np.float64]:
    return np.cumsum(weights.astype(np.float64))


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
