"""Is every emitted token right? Each is compared with one cold prefill of its whole text, without any tier.

A greedy token must score within GAP_LIMIT of the maximum, and its logprob must agree within LOGPROB_LIMIT, in float32
(`docs/architecture.md`, "What right means"). Equal tokens alone are a weak check: swapped pages often leave them equal.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

GAP_LIMIT = 1e-3  # logits; the noise of chunks and batches is below 1e-4, a swapped page moves logits by 0.1 and more
LOGPROB_LIMIT = 2e-3  # natural log; twice the gap's, since the sum over the vocabulary moves too


class Emitted(msgspec.Struct, frozen=True, array_like=True):
    """What a stack answered to one greedy request."""

    prompt: list[int]  # token ids
    tokens: list[int]  # token ids
    logprobs: list[float]  # natural log of the raw distribution, one for each of `tokens`

    @property
    def text(self) -> list[int]:
        """Prompt and output."""
        return self.prompt + self.tokens


class Scores(NamedTuple):
    """What a cold prefill says of the tokens from some position on."""

    gaps: Sequence[float]  # logits: the maximum less the token's
    logprobs: Sequence[float]  # natural log


class Verdict(msgspec.Struct, frozen=True):
    """The result over some requests."""

    checked: int = 0  # tokens
    wrong: int = 0  # tokens
    worst_gap: float = 0.0  # logits
    worst_difference: float = 0.0  # of logprobs


class Group(NamedTuple):
    """One text, and the requests whose prompt and output are a prefix of it: one prefill checks them all."""

    text: list[int]
    requests: list[Emitted]

    @property
    def first(self) -> int:
        """Position of the first emitted token in any of them."""
        return min(len(request.prompt) for request in self.requests)


Score = Callable[[list[int], int], Scores]  # (token ids, first position) -> scores of the tokens from there on


def group(requests: Iterable[Emitted]) -> list[Group]:
    """As few texts as possible: a causal model's scores of a text hold for each longer text that begins with it."""
    groups: list[Group] = []
    # In lexicographic order a text is followed at once by those that it begins, so that one look back is enough.
    for request in sorted(requests, key=lambda each: each.text, reverse=True):
        text = request.text
        if groups and groups[-1].text[: len(text)] == text:
            groups[-1].requests.append(request)
        else:
            groups.append(Group(text, [request]))
    return groups


def judge(requests: Iterable[Emitted], score: Score, progress: Callable[[int, int], None] | None = None) -> Verdict:
    """Check every emitted token. `progress` gets (tokens read, tokens to read) after each text."""
    groups = group(request for request in requests if request.tokens)
    total, read = sum(len(each.text) for each in groups), 0
    gaps: list[float] = []
    differences: list[float] = []
    for each in groups:
        scores = score(each.text, each.first)
        for request in each.requests:
            start = len(request.prompt) - each.first
            end = start + len(request.tokens)
            gaps += scores.gaps[start:end]
            differences += (abs(a - b) for a, b in zip(scores.logprobs[start:end], request.logprobs, strict=True))
        read += len(each.text)
        if progress:
            progress(read, total)
    # `not <=` rather than `>`: a value that is no number is wrong.
    wrong = sum(
        not (gap <= GAP_LIMIT and difference <= LOGPROB_LIMIT)
        for gap, difference in zip(gaps, differences, strict=True)
    )
    return Verdict(len(gaps), wrong, _worst(gaps), _worst(differences))


def _worst(values: list[float]) -> float:
    return max((value if math.isfinite(value) else math.inf for value in values), default=0.0)
