"""Paged attention equals a plain dense one, wherever the pages lie and however the tokens are cut into steps."""

import pytest
import torch

from kernels.attention import (
    DecodeAttention,
    PageTable,
    causal_mask,
    compact,
    decode_attention,
    extend_attention,
    store_kv,
)

PAGE, POOL_PAGES, HEADS, KV_HEADS, DIM = 4, 32, 6, 2, 8
SCALE = DIM**-0.5
DTYPES = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention in float64 of the last T of S tokens: q [T, H, D], k and v [S, KV, D] -> [T, H * D]."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) * SCALE
    tokens, length = scores.shape[1:]
    hidden = torch.arange(length)[None] > torch.arange(length - tokens, length)[:, None]
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hts,shd->thd", weights, v).flatten(1)


class Sequence:
    """One request's K/V, in random pages of a pool full of noise, and dense beside it."""

    def __init__(self, length: int, dtype: torch.dtype, consecutive: bool, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        self.k_pool, self.v_pool = (
            torch.randn(POOL_PAGES * PAGE, KV_HEADS, DIM, generator=g).to(dtype) for _ in range(2)
        )
        self.k, self.v = (torch.randn(length, KV_HEADS, DIM, generator=g).to(dtype) for _ in range(2))
        self.q = torch.randn(length, HEADS, DIM, generator=g).to(dtype)
        pages = torch.arange(3, 3 + -(-length // PAGE))
        self.table: PageTable = pages if consecutive else torch.randperm(POOL_PAGES - 1, generator=g)[: len(pages)] + 1
        slots = (self.table[:, None] * PAGE + torch.arange(PAGE)).flatten()[:length]
        store_kv(self.k_pool, self.v_pool, slots, self.k, self.v)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("consecutive", [True, False])
@pytest.mark.parametrize(("prefix", "tokens"), [(0, 1), (0, 13), (8, 5), (7, 6), (30, 1), (1, 40)])
def test_extend_equals_dense(dtype: torch.dtype, consecutive: bool, prefix: int, tokens: int) -> None:
    request = Sequence(prefix + tokens, dtype, consecutive)
    q = request.q[prefix:]
    expected = dense(q, request.k, request.v)
    arguments = (q, request.k_pool, request.v_pool)
    for table in (request.table, compact(request.table)):
        for mask in (None, causal_mask(tokens, prefix)):
            out = extend_attention(*arguments, table, prefix, PAGE, SCALE, mask)
            assert out.dtype == dtype
            torch.testing.assert_close(out.double(), expected, atol=DTYPES[dtype], rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_equals_dense_and_ignores_the_batch(dtype: torch.dtype) -> None:
    lens = [1, 4, 5, 31]
    requests = [Sequence(length, dtype, consecutive=length == 31, seed=length) for length in lens]
    k_pool, v_pool = (torch.cat([getattr(r, name) for r in requests]) for name in ("k_pool", "v_pool"))
    tables = [compact(r.table + i * POOL_PAGES) for i, r in enumerate(requests)]
    q = torch.stack([r.q[-1] for r in requests])
    out = decode_attention(q, k_pool, v_pool, tables, lens, PAGE, SCALE)
    for row, request in enumerate(requests):
        expected = dense(request.q[-1:], request.k, request.v)[0]
        torch.testing.assert_close(out[row].double(), expected, atol=DTYPES[dtype], rtol=0)
        alone = decode_attention(
            q[row : row + 1], k_pool, v_pool, tables[row : row + 1], lens[row : row + 1], PAGE, SCALE
        )
        assert torch.equal(alone[0], out[row])


def test_a_longer_table_than_needed_is_fine_and_a_shorter_one_is_refused() -> None:
    request = Sequence(12, torch.float32, consecutive=False)
    pools = (request.k_pool, request.v_pool)
    out = extend_attention(request.q[:5], *pools, request.table, 0, PAGE, SCALE)
    torch.testing.assert_close(out.double(), dense(request.q[:5], request.k[:5], request.v[:5]), atol=1e-5, rtol=0)
    for table in (request.table[:2], slice(3, 5)):
        with pytest.raises(ValueError, match="covers 8 tokens of 12"):
            extend_attention(request.q, *pools, table, 0, PAGE, SCALE)


def test_consecutive_pages_become_a_slice() -> None:
    assert compact(torch.tensor([5, 6, 7])) == slice(5, 8)
    assert compact(torch.tensor([5])) == slice(5, 6)
    for pages in ([5, 7], [6, 5], []):
        table = torch.tensor(pages, dtype=torch.int64)
        assert compact(table) is table


SHAPES = [(64, 3, 3), (128, 2, 4), (32, 1, 1), (48, 2, 2), (256, 1, 16), (80, 4, 1), (8, 2, 3)]  # dim, KV heads, group


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "kv_heads", "group"), SHAPES)
def test_decodes_of_a_step_equal_dense_and_ignore_the_batch(
    version: str, dtype: torch.dtype, dim: int, kv_heads: int, group: int
) -> None:
    g = torch.Generator().manual_seed(dim)
    lens = [1, 4, 5, 17, 64, 100]
    k_pool, v_pool = (torch.randn(64 * PAGE, kv_heads, dim, generator=g).to(dtype) for _ in range(2))
    order = torch.randperm(64, generator=g)
    tables = [order[:pages] for pages in (1, 1, 3, 5, 16, 25)]
    rows = torch.randn(len(lens), kv_heads * (group + 1), dim, generator=g).to(dtype)
    q = rows[:, : kv_heads * group]  # as the model gives it: a view of q and k side by side
    out = DecodeAttention(tables, lens, PAGE, SCALE)(q, k_pool, v_pool)
    assert (out.dtype, out.shape) == (dtype, (len(lens), kv_heads * group * dim))
    for row, (table, length) in enumerate(zip(tables, lens, strict=True)):
        slots = (table[:, None] * PAGE + torch.arange(PAGE)).flatten()[:length]
        expected = dense(q[row : row + 1], k_pool[slots], v_pool[slots])[0]
        torch.testing.assert_close(out[row].double(), expected, atol=DTYPES[dtype], rtol=0)
        alone = DecodeAttention([table], [length], PAGE, SCALE)(q[row : row + 1], k_pool, v_pool)
        assert torch.equal(alone[0], out[row])


def test_scores_far_apart_stay_finite(version: str) -> None:
    k_pool = torch.zeros(4 * PAGE, 1, 16)
    k_pool[5] = 1e4
    v_pool = torch.arange(4.0 * PAGE).view(-1, 1, 1).expand(-1, 1, 16).contiguous()
    out = DecodeAttention([torch.tensor([1, 2])], [8], PAGE, 1.0)(torch.ones(1, 1, 16), k_pool, v_pool)
    assert torch.equal(out, torch.full((1, 16), 5.0))


def test_decodes_beyond_their_pages_or_the_pool_are_refused(version: str) -> None:
    with pytest.raises(ValueError, match="covers 8 tokens of 9"):
        DecodeAttention([torch.tensor([1, 2])], [9], PAGE, SCALE)
    if version == "c":
        q, pool = torch.ones(1, 1, 16), torch.zeros(2 * PAGE, 1, 16)
        with pytest.raises(ValueError, match="page 2 is outside pools of 8 slots"):
            DecodeAttention([torch.tensor([2])], [1], PAGE, 1.0)(q, pool, pool)
        with pytest.raises(ValueError, match="page -1 is outside pools of 8 slots"):
            DecodeAttention([torch.tensor([1, -1])], [8], PAGE, 1.0)(q, pool, pool)


@pytest.mark.parametrize(("heads", "dim"), [(2, 32), (3, 16)])
def test_heads_that_differ_from_the_pool_s_are_refused(version: str, heads: int, dim: int) -> None:
    pool = torch.zeros(2 * PAGE, 2, 16)
    with pytest.raises((ValueError, RuntimeError)):
        DecodeAttention([torch.tensor([1])], [1], PAGE, 1.0)(torch.ones(1, heads, dim), pool, pool)
