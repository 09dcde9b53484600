"""One forward pass's input: the new tokens of several requests, side by side."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kernels.attention import DecodeAttention, PageTable, causal_mask, compact, extend_attention


class Segment(NamedTuple):
    """One request's rows in a batch."""

    start: int  # its first row
    tokens: int  # rows; 1 = a decode
    prefix_len: int  # tokens before them, whose K/V is in the pool (or will be, when `before_layer` returns)
    page_table: torch.Tensor  # int64 [n]: device pages in order of position, covering prefix_len + tokens


class ForwardBatch(NamedTuple):
    """T new tokens. Rows of a segment are consecutive, and every row is in one segment."""

    token_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T], in their own request
    slots: torch.Tensor  # int64 [T]: where their K/V goes
    segments: Sequence[Segment]
    sample_rows: torch.Tensor  # int64 [n]: rows whose logits are wanted


class StepAttention:
    """Attention of a batch, with what its layers share (masks, page runs, the decode group) made once."""

    def __init__(self, segments: Sequence[Segment], page_size: int, scale: float) -> None:
        self._page_size, self._scale = page_size, scale
        decodes = [segment for segment in segments if segment.tokens == 1]
        self._decode_rows = _rows([segment.start for segment in decodes])
        tables, lens = [segment.page_table for segment in decodes], [segment.prefix_len + 1 for segment in decodes]
        self._decode = DecodeAttention(tables, lens, page_size, scale) if decodes else None
        self._extends = [self._extend(segment) for segment in segments if segment.tokens > 1]

    def __call__(self, q: torch.Tensor, k_pool: torch.Tensor, v_pool: torch.Tensor) -> torch.Tensor:
        """q [T, H, D] of one layer, whose pools [slots, KV, D] hold the new K/V already -> [T, H * Dv]."""
        out = q.new_empty(q.shape[0], q.shape[1] * v_pool.shape[2])
        for rows, table, prefix_len, mask in self._extends:
            out[rows] = extend_attention(q[rows], k_pool, v_pool, table, prefix_len, self._page_size, self._scale, mask)
        if self._decode is not None:
            out[self._decode_rows] = self._decode(q[self._decode_rows], k_pool, v_pool)
        return out

    @staticmethod
    def _extend(segment: Segment) -> tuple[slice, PageTable, int, torch.Tensor | None]:
        rows = slice(segment.start, segment.start + segment.tokens)
        mask = causal_mask(segment.tokens, segment.prefix_len)
        return rows, compact(segment.page_table), segment.prefix_len, mask


def _rows(rows: list[int]) -> slice | torch.Tensor:
    """An index of these rows: a slice, which copies nothing, when they are consecutive."""
    if rows and rows == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[0] + len(rows))
    return torch.tensor(rows, dtype=torch.int64)
