"""ALLOC-09: the batched kernel, in torch and in Triton's interpreter, equals the plain algorithm."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from kernels.alloc_extend import alloc_extend
from shared.errors import CapacityError, GeometryError

Extend = Callable[..., torch.Tensor]


@pytest.fixture(params=["torch", "triton"])
def extend(request: pytest.FixtureRequest) -> Iterator[Extend]:
    if request.param == "torch":
        yield alloc_extend
        return
    with request.getfixturevalue("interpreted")():
        yield alloc_extend


def plainly(prefix: list[int], seq: list[int], last: list[int], free: list[int], page_size: int) -> list[int]:
    """Token by token, with one free list."""
    fresh, slots = iter(free), []
    for start, end, slot in zip(prefix, seq, last, strict=True):
        for position in range(start, end):
            slot = slot + 1 if position % page_size else next(fresh) * page_size
            slots.append(slot)
    return slots


def tensors(*lists: list[int]) -> list[torch.Tensor]:
    return [torch.tensor(each, dtype=torch.int64) for each in lists]


@pytest.mark.parametrize("seed", range(8))
def test_alloc_09_equals_the_plain_algorithm_on_random_input(extend: Extend, seed: int) -> None:
    rng = np.random.default_rng(seed)
    page_size, requests = int(rng.choice([1, 4, 16, 64])), int(rng.integers(1, 9))
    prefix = rng.integers(0, 200, requests)
    seq = prefix + rng.integers(0, 3, requests) * rng.integers(0, 400, requests)
    pages = rng.permutation(np.arange(1, 20_000))
    own, free = pages[:requests], pages[requests : requests + 8_000]
    last = own * page_size + (prefix - 1) % page_size
    lists = [each.tolist() for each in (prefix, seq, last, free)]
    assert extend(*tensors(*lists), page_size).tolist() == plainly(*lists, page_size)


def test_alloc_09_exactly_enough_pages_are_enough_and_one_less_is_short_by_one(extend: Extend) -> None:
    prefix, seq, last = [6, 0], [13, 4], [4 * 9 + 1, 0]
    assert extend(*tensors(prefix, seq, last, [5, 3, 8]), 4).tolist() == [
        38, 39, 20, 21, 22, 23, 12, 32, 33, 34, 35,
    ]  # fmt: skip
    with pytest.raises(CapacityError, match="2 free pages are short by 1"):
        extend(*tensors(prefix, seq, last, [5, 3]), 4)


def test_alloc_09_a_last_page_with_room_needs_no_free_one(extend: Extend) -> None:
    assert extend(*tensors([5], [8], [4 * 7], []), 4).tolist() == [29, 30, 31]


def test_alloc_09_lists_that_do_not_fit_are_refused(extend: Extend) -> None:
    with pytest.raises(GeometryError, match="one per request"):
        extend(*tensors([1, 2], [3], [0], [1]), 4)
    with pytest.raises(GeometryError, match="shorter than its prefix"):
        extend(*tensors([5], [4], [0], [1]), 4)
