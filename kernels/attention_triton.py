"""The Triton versions of `store_kv` and of paged attention. Imported where there is a GPU, and by tests in Triton's
interpreter.

One loop reads the pages where they lie and keeps a running softmax in float32 (FlashAttention-2, Dao 2023). The query
heads of one KV head are rows of one tile, so that K/V is read once for all of them. A prompt's program has a tile of
(token, head) rows; a decode has few rows and many positions, so that its positions are split over programs whose
results a second kernel joins (Flash-Decoding, Dao et al. 2023). The size of a split never depends on the batch, so
that a request's result doesn't either.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

TILE_BYTES = 16384  # of a tile of q, k or v: with two stages of k and v it fits the 99 KiB of small GPUs
LEAST = 16  # rows, columns and depth of the smallest tile that tensor cores multiply
SPLIT = 512  # positions of one program of a decode: some thousand programs for a few long requests
STAGES = 2  # of loads in flight


@triton.jit
def _store(  # type: ignore[no-untyped-def]
    k_pool, v_pool, slots, k, v, k_token, k_head, v_token, v_head,
    heads: tl.constexpr, dim: tl.constexpr, v_dim: tl.constexpr,
    heads_block: tl.constexpr, dim_block: tl.constexpr, v_block: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    h, d, e = tl.arange(0, heads_block)[:, None], tl.arange(0, dim_block)[None], tl.arange(0, v_block)[None]
    here = (h < heads) & (d < dim)
    tl.store(k_pool + (slot * heads + h) * dim + d, tl.load(k + token * k_token + h * k_head + d, mask=here), mask=here)
    here = (h < heads) & (e < v_dim)
    tl.store(
        v_pool + (slot * heads + h) * v_dim + e, tl.load(v + token * v_token + h * v_head + e, mask=here), mask=here
    )


@triton.jit
def _scan(  # type: ignore[no-untyped-def]
    q, last, start, stop, k_pool, v_pool, table, kv_head, scale,
    rows: tl.constexpr, kv_heads: tl.constexpr, dim: tl.constexpr, v_dim: tl.constexpr, page_size: tl.constexpr,
    dim_block: tl.constexpr, v_block: tl.constexpr, block: tl.constexpr, operand: tl.constexpr,
):  # fmt: skip
    """Row r of q attends to positions start .. stop - 1 up to last[r]; each row sees `start`.

    `tl.max` and `tl.sum` are compiled or interpreted as it was set when Triton was imported, `tl.reduce` as it is now.
    """
    d, e = tl.arange(0, dim_block), tl.arange(0, v_block)
    best = tl.full([rows], float("-inf"), tl.float32)
    total = tl.full([rows], 0.0, tl.float32)
    out = tl.full([rows, v_block], 0.0, tl.float32)
    for first in range(start, stop, block):
        position = first + tl.arange(0, block)
        inside = position < stop
        page = tl.load(table + position // page_size, mask=inside, other=0)
        at = (page * page_size + position % page_size) * kv_heads + kv_head
        k = tl.load(k_pool + at[None] * dim + d[:, None], mask=inside[None] & (d < dim)[:, None], other=0.0)
        scores = tl.dot(q.to(operand), k.to(operand), input_precision="ieee") * scale
        scores = tl.where(inside[None] & (position[None] <= last[:, None]), scores, float("-inf"))
        higher = tl.maximum(best, tl.reduce(scores, 1, tl.standard._elementwise_max))
        weights, shrink = tl.exp(scores - higher[:, None]), tl.exp(best - higher)
        v = tl.load(v_pool + at[:, None] * v_dim + e[None], mask=inside[:, None] & (e < v_dim)[None], other=0.0)
        weighed = tl.dot(weights.to(v.dtype).to(operand), v.to(operand), input_precision="ieee")
        best, total, out = (
            higher,
            total * shrink + tl.reduce(weights, 1, tl.standard._sum_combine),
            out * shrink[:, None] + weighed,
        )
    return out / total[:, None], best + tl.log(total)


@triton.jit
def _extend(  # type: ignore[no-untyped-def]
    out, q, q_token, q_head, k_pool, v_pool, table, tokens, prefix_len, scale,
    rows: tl.constexpr, group: tl.constexpr, kv_heads: tl.constexpr, dim: tl.constexpr, v_dim: tl.constexpr,
    page_size: tl.constexpr, dim_block: tl.constexpr, v_block: tl.constexpr, block: tl.constexpr,
    operand: tl.constexpr,
):  # fmt: skip
    kv_head, row = tl.program_id(1), tl.program_id(0) * rows + tl.arange(0, rows)
    token, head = row // group, kv_head * group + row % group
    d, e, here = tl.arange(0, dim_block), tl.arange(0, v_block), token < tokens
    query = tl.load(
        q + token[:, None].to(tl.int64) * q_token + head[:, None] * q_head + d[None],
        mask=here[:, None] & (d < dim)[None],
        other=0.0,
    )
    stop = prefix_len + tl.minimum(tokens, (tl.program_id(0) * rows + rows - 1) // group + 1)
    result, _ = _scan(
        query, prefix_len + token, 0, stop, k_pool, v_pool, table, kv_head, scale,
        rows, kv_heads, dim, v_dim, page_size, dim_block, v_block, block, operand,
    )  # fmt: skip
    at = (token[:, None].to(tl.int64) * kv_heads * group + head[:, None]) * v_dim + e[None]
    tl.store(out + at, result, mask=here[:, None] & (e < v_dim)[None])


@triton.jit
def _decode(  # type: ignore[no-untyped-def]
    partial, log_sums, q, q_row, q_head, k_pool, v_pool, pages, starts, lens, splits, scale,
    split_size: tl.constexpr, rows: tl.constexpr, group: tl.constexpr, kv_heads: tl.constexpr, dim: tl.constexpr,
    v_dim: tl.constexpr, page_size: tl.constexpr, dim_block: tl.constexpr, v_block: tl.constexpr,
    block: tl.constexpr, operand: tl.constexpr,
):  # fmt: skip
    request, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length, start = tl.load(lens + request).to(tl.int32), split * split_size
    if start < length:
        r, d, e = tl.arange(0, rows), tl.arange(0, dim_block), tl.arange(0, v_block)
        head, here, stop = kv_head * group + r, r < group, tl.minimum(start + split_size, length)
        query = tl.load(
            q + request * q_row + head[:, None] * q_head + d[None], mask=here[:, None] & (d < dim)[None], other=0.0
        )
        result, log_sum = _scan(
            query, stop + r, start, stop, k_pool, v_pool, pages + tl.load(starts + request), kv_head, scale,
            rows, kv_heads, dim, v_dim, page_size, dim_block, v_block, block, operand,
        )  # fmt: skip
        at = (request * kv_heads * group + head) * splits + split
        tl.store(log_sums + at, log_sum, mask=here)
        tl.store(partial + at[:, None] * v_dim + e[None], result, mask=here[:, None] & (e < v_dim)[None])


@triton.jit
def _join(  # type: ignore[no-untyped-def]
    out, partial, log_sums, lens, splits,
    split_size: tl.constexpr, heads: tl.constexpr, v_dim: tl.constexpr, v_block: tl.constexpr,
):  # fmt: skip
    request, head, e = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, v_block)
    at = request * heads + head
    best = tl.load(log_sums + at * splits)
    total, result = 1.0, tl.load(partial + at * splits * v_dim + e, mask=e < v_dim, other=0.0)
    for split in range(1, (tl.load(lens + request).to(tl.int32) + split_size - 1) // split_size):
        log_sum = tl.load(log_sums + at * splits + split)
        part = tl.load(partial + (at * splits + split) * v_dim + e, mask=e < v_dim, other=0.0)
        higher = tl.maximum(best, log_sum)
        shrink, weight = tl.exp(best - higher), tl.exp(log_sum - higher)
        best, total, result = higher, total * shrink + weight, result * shrink + part * weight
    tl.store(out + at * v_dim + e, result / total, mask=e < v_dim)


def store(k_pool: torch.Tensor, v_pool: torch.Tensor, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """As `store_kv`. The slots are trusted: to look at them here would wait for the GPU."""
    if not k_pool.dtype == v_pool.dtype == k.dtype == v.dtype or not k.shape[:2] == v.shape[:2] == (
        len(slots), k_pool.shape[1],
    ):  # fmt: skip
        raise ValueError(f"k {_named(k)} and v {_named(v)} don't fit {len(slots)} slots of a pool {_named(k_pool)}")
    if k.shape[2] != k_pool.shape[2] or v.shape[1:] != v_pool.shape[1:]:
        raise ValueError(f"k {_named(k)} or v {_named(v)} doesn't fit pools {_named(k_pool)} and {_named(v_pool)}")
    _check_pools(k_pool, v_pool)
    if len(slots):
        k, v = _rows(k), _rows(v)
        _store[(len(slots),)](
            k_pool, v_pool, slots, k, v, *k.stride()[:2], *v.stride()[:2],
            heads=k.shape[1], dim=k.shape[2], v_dim=v.shape[2], heads_block=triton.next_power_of_2(k.shape[1]),
            dim_block=triton.next_power_of_2(k.shape[2]), v_block=triton.next_power_of_2(v.shape[2]),
        )  # fmt: skip


def extend(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    page_table: torch.Tensor,
    prefix_len: int,
    page_size: int,
    scale: float,
) -> torch.Tensor:
    """As `extend_attention`, of a table that covers all tokens. Its page ids are trusted, as slots are in `store`."""
    shape = _shape(q, k_pool, v_pool, page_size)
    q, tokens = _rows(q), len(q)
    out = q.new_empty(tokens, q.shape[1] * v_pool.shape[2])
    rows = shape["block"]
    if tokens:
        grid = triton.cdiv(tokens * shape["group"], rows), shape["kv_heads"]
        _extend[grid](
            out, q, *q.stride()[:2], k_pool, v_pool, page_table, tokens, prefix_len, scale,
            rows=rows, num_stages=STAGES, **shape,
        )  # fmt: skip
    return out


def decode(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    pages: torch.Tensor,
    starts: torch.Tensor,
    lens: torch.Tensor,
    longest: int,
    page_size: int,
    scale: float,
) -> torch.Tensor:
    """As `decode_attention`: request i has the page ids from pages[starts[i]], and lens[i] tokens, `longest` at most.
    All three are int64, on q's device, and trusted."""
    shape = _shape(q, k_pool, v_pool, page_size)
    q, (requests, heads, _), v_dim = _rows(q), q.shape, v_pool.shape[2]
    splits = triton.cdiv(longest, SPLIT)
    partial, log_sums = (
        torch.empty(requests, heads, splits, *rest, dtype=torch.float32, device=q.device) for rest in ([v_dim], [])
    )
    _decode[requests, shape["kv_heads"], splits](
        partial, log_sums, q, *q.stride()[:2], k_pool, v_pool, pages, starts, lens, splits, scale,
        split_size=SPLIT, rows=max(LEAST, triton.next_power_of_2(shape["group"])), num_stages=STAGES, **shape,
    )  # fmt: skip
    out = q.new_empty(requests, heads * v_dim)
    _join[requests, heads](
        out, partial, log_sums, lens, splits, split_size=SPLIT, heads=heads, v_dim=v_dim, v_block=shape["v_block"]
    )
    return out


def _shape(q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor, page_size: int) -> dict[str, Any]:
    """The constants of both attention kernels. Raises ValueError for tensors that don't fit each other."""
    _, heads, dim = q.shape
    kv_heads = k_pool.shape[1]
    if dim != k_pool.shape[2] or heads % kv_heads or v_pool.shape[1] != kv_heads or q.dtype != k_pool.dtype:
        raise ValueError(f"queries {_named(q)} don't fit pools {_named(k_pool)} and {_named(v_pool)}")
    _check_pools(k_pool, v_pool)
    dim_block, v_block = (max(LEAST, triton.next_power_of_2(each)) for each in (dim, v_pool.shape[2]))
    block = max(LEAST, min(64, TILE_BYTES // (max(dim_block, v_block) * q.element_size())))
    # The interpreter multiplies the bits of bfloat16 as integers.
    plain = q.dtype == torch.bfloat16 and isinstance(_scan, InterpretedFunction)
    return {
        "group": heads // kv_heads, "kv_heads": kv_heads, "dim": dim, "v_dim": v_pool.shape[2], "page_size": page_size,
        "dim_block": dim_block, "v_block": v_block, "block": block,
        "operand": tl.float32 if plain else getattr(tl, str(q.dtype).removeprefix("torch.")),
    }  # fmt: skip


def _check_pools(k_pool: torch.Tensor, v_pool: torch.Tensor) -> None:
    if not (k_pool.is_contiguous() and v_pool.is_contiguous()) or k_pool.dtype != v_pool.dtype:
        raise ValueError(f"pools {_named(k_pool)} and {_named(v_pool)} must be contiguous and of one dtype")


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """The same, with elements of a head side by side; tokens and heads may lie apart."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _named(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
