"""The oracle's grouping and its two limits, over a made-up model."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.oracle import GAP_LIMIT, LOGPROB_LIMIT, Emitted, Scores, Verdict, group, judge

tokens = st.lists(st.integers(0, 2), min_size=1, max_size=6)


def exact(ids: list[int], first: int) -> Scores:
    """A model in which every token is the best one, with a logprob that depends on its whole prefix."""
    return Scores([0.0] * (len(ids) - first), [logprob(ids[: end + 1]) for end in range(first, len(ids))])


def logprob(prefix: list[int]) -> float:
    return -float(sum(token * (place + 1) for place, token in enumerate(prefix)))


def right(prompt: list[int], output: list[int]) -> Emitted:
    text = prompt + output
    return Emitted(prompt, output, [logprob(text[: end + 1]) for end in range(len(prompt), len(text))])


def test_a_request_that_begins_another_shares_its_prefill() -> None:
    first, second, other = right([1, 2], [3]), right([1, 2, 3, 4], [5]), right([1, 9], [9])
    groups = group([first, other, second])
    assert sorted((each.text, each.first) for each in groups) == [([1, 2, 3, 4, 5], 2), ([1, 9, 9], 2)]
    assert sum(len(each.requests) for each in groups) == 3


@given(st.lists(st.tuples(tokens, tokens), max_size=12))
def test_every_request_is_judged_once_with_as_few_texts_as_possible(
    pairs: list[tuple[list[int], list[int]]],
) -> None:
    requests = [right(prompt, output) for prompt, output in pairs]
    groups = group(requests)
    judged = [request for each in groups for request in each.requests]
    assert sorted(each.text for each in judged) == sorted(each.text for each in requests)
    for each in groups:
        assert all(each.text[: len(request.text)] == request.text for request in each.requests)
    texts = [each.text for each in groups]
    assert not any(a is not b and b[: len(a)] == a for a in texts for b in texts)
    assert judge(requests, exact) == Verdict(sum(len(output) for _, output in pairs), 0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("gap", "difference", "wrong"),
    [
        (0.9 * GAP_LIMIT, 0.9 * LOGPROB_LIMIT, 0),
        (1.1 * GAP_LIMIT, 0.0, 1),
        (0.0, 1.1 * LOGPROB_LIMIT, 1),
        (0.0, -1.1 * LOGPROB_LIMIT, 1),
        (math.nan, 0.0, 1),
        (0.0, math.nan, 1),
    ],
)
def test_a_token_is_wrong_beyond_either_limit(gap: float, difference: float, wrong: int) -> None:
    request = right([1], [2, 2])

    def score(ids: list[int], first: int) -> Scores:
        scores = exact(ids, first)
        return Scores([0.0, gap], [scores.logprobs[0], scores.logprobs[1] + difference])

    verdict = judge([request], score)
    assert (verdict.checked, verdict.wrong) == (2, wrong)


def test_progress_counts_the_tokens_that_are_read() -> None:
    seen: list[tuple[int, int]] = []
    judge([right([1], [2]), right([2], [2, 2]), right([2], [2])], exact, lambda read, total: seen.append((read, total)))
    assert seen == [(3, 5), (5, 5)]


def test_a_request_without_tokens_is_not_read() -> None:
    assert judge([Emitted([1, 2], [], [])], exact) == Verdict()
