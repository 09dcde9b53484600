"""Paged attention: in torch, which is the reference, in Triton on a GPU, and for decodes on a CPU in C.

Torch gathers K/V page by page, each page one contiguous copy; a table of consecutive pages is read in place. C and
Triton read all pages in place. A request's attention never depends on the others in its batch, so that its result
doesn't either.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from kernels import native
from kernels.gpu import triton_version

if TYPE_CHECKING:
    from torch import Tensor

PageTable: TypeAlias = "Tensor | slice"  # int64 [n] page ids in order of position, or a run of consecutive ones

LANES = 16  # of paged_attention.c: heads are whole vectors
MAX_DIM, MAX_GROUP = 256, 16  # of paged_attention.c: elements of a head, query heads of a KV head


def compact(page_table: "Tensor") -> PageTable:
    """The same pages (int64 [n]), as a slice when their ids are consecutive: those are read without a copy."""
    pages = page_table.tolist()
    if pages and pages == list(range(pages[0], pages[0] + len(pages))):
        return slice(pages[0], pages[0] + len(pages))
    return page_table


def causal_mask(tokens: int, prefix_len: int) -> "Tensor | None":
    """bool [tokens, prefix_len + tokens]: may token i see position j? None where no mask is needed.

    For a step, make it once and pass it to every layer.
    """
    import torch

    if prefix_len == 0 or tokens == 1:
        return None
    return torch.ones(tokens, prefix_len + tokens, dtype=torch.bool).tril_(prefix_len)


def store_kv(k_pool: "Tensor", v_pool: "Tensor", slots: "Tensor", k: "Tensor", v: "Tensor") -> None:
    """Write k [T, KV, D] and v [T, KV, Dv] into slots (int64 [T]) of the pools [slots, KV, D] and [slots, KV, Dv].

    Slots must differ and be in the pools; on a GPU they are trusted.
    """
    if (triton := triton_version("attention", k_pool)) is not None:
        triton.store(k_pool, v_pool, slots, k, v)
        return
    k_pool.index_copy_(0, slots, k)
    v_pool.index_copy_(0, slots, v)


def extend_attention(
    q: "Tensor",
    k_pool: "Tensor",
    v_pool: "Tensor",
    page_table: PageTable,
    prefix_len: int,
    page_size: int,
    scale: float,
    mask: "Tensor | None" = None,
) -> "Tensor":
    """Attention of one request's new tokens to its prefix and, causally, to themselves.

    q: [T, H, D] at positions prefix_len .. prefix_len + T, whose K/V are in the pools already. k_pool, v_pool:
    [slots, KV, D]; query head h reads KV head h // (H // KV). page_table: int64 [n], or what `compact` made of it, in
    order of position and covering prefix_len + T tokens; on a GPU its page ids are trusted. mask:
    `causal_mask(T, prefix_len)`, made here if not given; Triton needs none. Returns [T, H * Dv] in q's dtype.

    Raises ValueError for a table that is too short.
    """
    import torch.nn.functional as F

    tokens = q.shape[0]
    if (triton := triton_version("attention", q)) is not None:
        table = _whole(page_table, prefix_len + tokens, page_size, q)
        result: Tensor = triton.extend(q, k_pool, v_pool, table, prefix_len, page_size, scale)
        return result
    mask = causal_mask(tokens, prefix_len) if mask is None else mask
    mask = None if mask is None else mask.to(q.device)
    keys, values = (_gather(pool, page_table, prefix_len + tokens, page_size) for pool in (k_pool, v_pool))
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=mask is None and tokens > 1,
        scale=scale,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1).reshape(tokens, -1)


def decode_attention(
    q: "Tensor",
    k_pool: "Tensor",
    v_pool: "Tensor",
    page_tables: Sequence[PageTable],
    lens: Sequence[int],
    page_size: int,
    scale: float,
) -> "Tensor":
    """Attention of one new token of each of B requests.

    q: [B, H, D]. lens: tokens of each request, the new one included, whose K/V is in the pools already. The rest as
    in `extend_attention`. Returns [B, H * Dv] in q's dtype.
    """
    import torch.nn.functional as F

    kv_heads = k_pool.shape[1]
    grouped = q.unflatten(1, (kv_heads, -1))  # the query heads of one KV head are rows of one product
    out = q.new_empty(q.shape[0], q.shape[1] * v_pool.shape[2])
    for row, (page_table, length) in enumerate(zip(page_tables, lens, strict=True)):
        keys, values = (_gather(pool, page_table, length, page_size).transpose(0, 1) for pool in (k_pool, v_pool))
        one = F.scaled_dot_product_attention(grouped[row][None], keys[None], values[None], scale=scale)
        out[row] = one.flatten()
    return out


class DecodeAttention:
    """`decode_attention` for all layers of a step: what they share is checked and made once."""

    def __init__(self, page_tables: "Sequence[Tensor]", lens: Sequence[int], page_size: int, scale: float) -> None:
        """page_tables: int64 [n] page ids of each request. lens, scale: as in `decode_attention`.

        Raises ValueError for a table that is too short.
        """
        import torch

        for table, length in zip(page_tables, lens, strict=True):
            if len(table) * page_size < length:
                raise ValueError(f"the page table covers {len(table) * page_size} tokens of {length}; {page_size=}")
        self._tables, self._lens, self._page_size, self._scale = page_tables, lens, page_size, scale
        self._compact: list[PageTable] | None = None
        self._on_gpu: list[Tensor] | None = None
        self._pages = torch.cat(list(page_tables))
        self._counts = torch.tensor(lens, dtype=torch.int64)
        self._starts = torch.tensor([0, *map(len, page_tables)][:-1], dtype=torch.int64).cumsum(0)
        self._first_page, self._last_page = int(self._pages.min()), int(self._pages.max())
        self._scratch: Tensor | None = None

    def __call__(self, q: "Tensor", k_pool: "Tensor", v_pool: "Tensor") -> "Tensor":
        """q: [B, H, D]; pools: [slots, KV, D]. Returns [B, H * Dv] in q's dtype.

        Raises ValueError for a page outside the pools.
        """
        if (triton := triton_version("attention", q)) is not None:
            self._check_pages(k_pool, v_pool)
            self._on_gpu = self._on_gpu or [each.to(q.device) for each in (self._pages, self._starts, self._counts)]
            out: Tensor = triton.decode(
                q, k_pool, v_pool, *self._on_gpu, max(self._lens), self._page_size, self._scale
            )  # fmt: skip
            return out
        extension, _ = native.load()
        if extension is None or not _suits_c(q, k_pool, v_pool):
            self._compact = self._compact or [compact(table) for table in self._tables]
            return decode_attention(q, k_pool, v_pool, self._compact, self._lens, self._page_size, self._scale)
        return self._by_c(extension, q, k_pool, v_pool)

    def _check_pages(self, k_pool: "Tensor", v_pool: "Tensor") -> None:
        slots = min(k_pool.shape[0], v_pool.shape[0])
        if (self._last_page + 1) * self._page_size > slots:
            raise ValueError(f"page {self._last_page} is outside pools of {slots} slots")
        if self._first_page < 0:
            raise ValueError(f"page {self._first_page} is outside pools of {slots} slots")

    def _by_c(self, extension: native.Native, q: "Tensor", k_pool: "Tensor", v_pool: "Tensor") -> "Tensor":
        import torch

        self._check_pages(k_pool, v_pool)
        rows, heads, dim = q.shape
        room = -(-max(self._lens) // LANES) * LANES
        if self._scratch is None:
            self._scratch = torch.empty(heads * (room + dim), dtype=torch.float32)
        out = q.new_empty(rows, heads * dim)
        shape = native.Shape(
            heads, k_pool.shape[1], dim, self._page_size, q.stride(0), self._scale, q.dtype == torch.bfloat16
        )
        lists = self._pages.data_ptr(), self._starts.data_ptr(), self._counts.data_ptr(), rows
        addresses = q.data_ptr(), k_pool.data_ptr(), v_pool.data_ptr(), out.data_ptr()
        extension.decode_attention(*addresses, lists, shape, self._scratch.data_ptr())
        return out


def _suits_c(q: "Tensor", k_pool: "Tensor", v_pool: "Tensor") -> bool:
    """May C attend to these? It knows float32 and bfloat16 on a CPU, and heads of whole vectors."""
    import torch

    heads, dim = q.shape[1:]
    return (
        q.dtype in (torch.float32, torch.bfloat16)
        and q.dtype == k_pool.dtype == v_pool.dtype
        and q.device.type == k_pool.device.type == v_pool.device.type == "cpu"
        and q.stride()[1:] == (dim, 1)
        and k_pool.is_contiguous()
        and v_pool.is_contiguous()
        and k_pool.shape[1:] == v_pool.shape[1:]
        and dim % LANES == 0
        and dim <= MAX_DIM
        and heads <= MAX_GROUP * k_pool.shape[1]
        and heads % k_pool.shape[1] == 0
        and dim == k_pool.shape[2]
    )


def _whole(page_table: PageTable, length: int, page_size: int, like: "Tensor") -> "Tensor":
    """The table as int64 [n] on the device of `like`. Raises ValueError when it covers less than `length` tokens."""
    import torch

    table = page_table
    if isinstance(table, slice):
        table = torch.arange(table.start, table.stop, device=like.device)
    if len(table) * page_size < length:
        raise ValueError(f"the page table covers {len(table) * page_size} tokens of {length}; page_size {page_size}")
    return table.to(like.device)


def _gather(pool: "Tensor", page_table: PageTable, length: int, page_size: int) -> "Tensor":
    """[length, KV, D]: the first `length` tokens of the pages."""
    pages = -(-length // page_size)
    if isinstance(page_table, slice):
        start = page_table.start * page_size
        found = pool[start : min(start + length, page_table.stop * page_size)]
    else:
        rows = pool.view(-1, page_size * pool[0].numel())
        found = rows.index_select(0, page_table[:pages]).view(-1, *pool.shape[1:])[:length]
    if found.shape[0] != length:
        raise ValueError(f"the page table covers {found.shape[0]} tokens of {length}; page_size {page_size}")
    return found
