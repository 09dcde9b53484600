"""The Triton kernels of attention, in Triton's interpreter, equal the torch reference on random shapes; and they
compile for a GPU."""

import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import pytest
import torch

from kernels.attention import DecodeAttention, compact, decode_attention, extend_attention, store_kv

Interpreted = Callable[[], AbstractContextManager[None]]

DTYPES = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
SCALE = 0.3
POOL_TOKENS = 1024


class Case(NamedTuple):
    """Random sizes, and pools full of noise."""

    page_size: int
    group: int
    k_pool: torch.Tensor  # [slots, KV, D]
    v_pool: torch.Tensor  # [slots, KV, Dv]

    def queries(self, tokens: int) -> torch.Tensor:
        """[tokens, H, D] as a model gives it: a view of q and k side by side."""
        kv_heads, dim = self.k_pool.shape[1:]
        heads = kv_heads * self.group
        return torch.randn(tokens, heads + kv_heads, dim).to(self.k_pool.dtype)[:, :heads]

    def table(self, tokens: int) -> torch.Tensor:
        return torch.randperm(POOL_TOKENS // self.page_size - 1)[: -(-tokens // self.page_size)] + 1


def case(seed: int, dtype: torch.dtype, dim: int = 0, v_dim: int = 0) -> Case:
    torch.manual_seed(seed)
    rng = random.Random(seed)
    dim, kv_heads = dim or rng.choice([8, 16, 32, 48, 64, 80]), rng.choice([1, 2, 3])
    pools = (torch.randn(POOL_TOKENS, kv_heads, size).to(dtype) for size in (dim, v_dim or dim))
    return Case(rng.choice([1, 4, 16, 64]), rng.choice([1, 2, 3, 7]), *pools)


def check(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert (found.dtype, found.shape) == (dtype, expected.shape)
    torch.testing.assert_close(found, expected, atol=DTYPES[dtype], rtol=DTYPES[dtype])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", DTYPES)
def test_store_kv_equals_torch(interpreted: Interpreted, dtype: torch.dtype, seed: int) -> None:
    some = case(seed, dtype, v_dim=24)
    tokens, kv_heads = 5, some.k_pool.shape[1]
    slots = torch.randperm(POOL_TOKENS)[:tokens]
    k = torch.randn(tokens, kv_heads + 2, some.k_pool.shape[2]).to(dtype)[:, 2:]
    v = torch.randn(kv_heads, tokens, 24).to(dtype).transpose(0, 1)
    expected = some.k_pool.clone(), some.v_pool.clone()
    store_kv(*expected, slots, k, v)
    with interpreted():
        store_kv(some.k_pool, some.v_pool, slots, k, v)
    assert torch.equal(some.k_pool, expected[0])
    assert torch.equal(some.v_pool, expected[1])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", DTYPES)
def test_extend_equals_torch(interpreted: Interpreted, dtype: torch.dtype, seed: int) -> None:
    some, rng = case(seed, dtype), random.Random(seed)
    prefix, tokens = rng.choice([0, 1, 16, 63, 150]), rng.choice([1, 2, 17, 40])
    table = some.table(prefix + tokens)
    table = table.sort().values if seed == 0 else table
    q = some.queries(tokens)
    arguments = q, some.k_pool, some.v_pool, table, prefix, some.page_size, SCALE
    expected = extend_attention(*arguments)
    with interpreted():
        check(extend_attention(*arguments), expected, dtype)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_equals_torch_and_ignores_the_batch(interpreted: Interpreted, dtype: torch.dtype, seed: int) -> None:
    some = case(seed, dtype)
    lens = [1, random.Random(seed).choice([15, 64, 65, 100]), 512 + seed]  # the last in two splits, the first in one
    tables, q = [some.table(length) for length in lens], some.queries(len(lens))
    expected = decode_attention(q, some.k_pool, some.v_pool, tables, lens, some.page_size, SCALE)
    with interpreted():
        found = DecodeAttention(tables, lens, some.page_size, SCALE)(q, some.k_pool, some.v_pool)
        check(found, expected, dtype)
        alone = DecodeAttention(tables[1:2], lens[1:2], some.page_size, SCALE)(q[1:2], some.k_pool, some.v_pool)
    assert torch.equal(alone[0], found[1])


def test_values_may_be_wider_or_narrower_than_keys_and_tables_a_run(interpreted: Interpreted) -> None:
    for seed, v_dim in enumerate((8, 40)):
        some = case(seed, torch.float32, dim=24, v_dim=v_dim)
        q, table = some.queries(9), torch.arange(1, 1 + -(-70 // some.page_size))
        expected = extend_attention(q, some.k_pool, some.v_pool, table, 61, some.page_size, SCALE)
        with interpreted():
            found = extend_attention(q, some.k_pool, some.v_pool, compact(table), 61, some.page_size, SCALE)
            last = DecodeAttention([table], [70], some.page_size, SCALE)(q[8:], some.k_pool, some.v_pool)
        check(found, expected, torch.float32)
        check(last[0], expected[8], torch.float32)


@pytest.mark.parametrize("at", [20, 700])  # in the first split, in the second
def test_scores_far_apart_stay_finite_across_splits(interpreted: Interpreted, at: int) -> None:
    k_pool, v_pool = torch.zeros(POOL_TOKENS, 1, 16), torch.zeros(POOL_TOKENS, 1, 16)
    k_pool[at], v_pool[at] = 1e4, 5.0
    table = torch.arange(POOL_TOKENS // 16)
    with interpreted():
        out = DecodeAttention([table], [POOL_TOKENS], 16, 1.0)(torch.ones(1, 1, 16), k_pool, v_pool)
        last = extend_attention(torch.ones(2, 1, 16), k_pool, v_pool, table, at + 10, 16, 1.0)
    assert torch.equal(out, torch.full((1, 16), 5.0))
    assert torch.equal(last, torch.full((2, 16), 5.0))


def test_what_does_not_fit_is_refused(interpreted: Interpreted) -> None:
    pool, q = torch.zeros(8, 2, 16), torch.ones(1, 2, 16)
    with interpreted():
        with pytest.raises(ValueError, match="covers 4 tokens of 5"):
            extend_attention(q, pool, pool, torch.tensor([1]), 4, 4, SCALE)
        with pytest.raises(ValueError, match="page 2 is outside pools of 8 slots"):
            DecodeAttention([torch.tensor([2])], [1], 4, SCALE)(q, pool, pool)
        for wrong in (torch.ones(1, 3, 16), torch.ones(1, 2, 32), q.half()):
            with pytest.raises(ValueError, match="don't fit pools"):
                extend_attention(wrong, pool, pool, torch.tensor([1]), 0, 4, SCALE)
        with pytest.raises(ValueError, match="contiguous"):
            extend_attention(q, pool.transpose(0, 1).contiguous().transpose(0, 1), pool, torch.tensor([1]), 0, 4, SCALE)
        with pytest.raises(ValueError, match="don't fit 2 slots"):
            store_kv(pool, pool, torch.tensor([1, 2]), q, q)
        with pytest.raises(ValueError, match="doesn't fit pools"):
            store_kv(pool, pool, torch.tensor([1]), torch.ones(1, 2, 8), q)
