"""The Triton version of `PageGather`. Imported where there is a GPU, and by tests in Triton's interpreter.

One launch for each part copies all of its layers: a table of addresses tells the kernel where the layers' pools are.
Bytes travel in the widest integers that every address and stride is a multiple of.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from kernels.native import PageIds
    from kernels.page_gather import Place

WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
BLOCK = 2048  # words of a program: 16 KiB at best, of which a GPU's few thousand programs hide the latency


@triton.jit
def _copy(  # type: ignore[no-untyped-def]
    pools, places, buffer, pages, rows,
    heads: tl.constexpr, page_size: tl.constexpr, width: tl.constexpr,
    block: tl.constexpr, width_block: tl.constexpr, to_buffer: tl.constexpr,
):  # fmt: skip
    """width: words of a head. A program copies `block` heads of one unit; head i is of token i // heads."""
    page, row = tl.load(pages + tl.program_id(0)), tl.load(rows + tl.program_id(0))
    layer = tl.program_id(1)
    pool = tl.load(pools + layer).to(tl.pointer_type(buffer.dtype.element_ty))
    offset, row_stride = tl.load(places + layer * 4), tl.load(places + layer * 4 + 1)
    head_stride, token_stride = tl.load(places + layer * 4 + 2), tl.load(places + layer * 4 + 3)
    i, word = tl.program_id(2) * block + tl.arange(0, block), tl.arange(0, width_block)[None]
    here = (i < heads * page_size)[:, None] & (word < width)
    in_pool = pool + (page * page_size * heads + i)[:, None] * width + word
    start = offset + row * row_stride + (i % heads) * head_stride + (i // heads) * token_stride
    in_buffer = buffer + start[:, None] + word
    if to_buffer:
        tl.store(in_buffer, tl.load(in_pool, mask=here), mask=here)
    else:
        tl.store(in_pool, tl.load(in_buffer, mask=here), mask=here)


class Gather:
    """As `PageGather`, unchecked."""

    def __init__(
        self, layers: Sequence[Sequence[torch.Tensor]], places: Sequence[Sequence["Place"]], page_size: int
    ) -> None:
        self._first, self._page_size, self._device = layers[0], page_size, layers[0][0].device
        pools = torch.tensor([[pool.data_ptr() for pool in parts] for parts in layers])
        self._places = torch.tensor(places)  # [layers, parts, 4]
        head_bytes = [pool.shape[2] * pool.element_size() for pool in self._first]
        self._step = math.gcd(8, *head_bytes, *pools.flatten().tolist(), *self._places.flatten().tolist())
        self._pools = pools.T.contiguous().to(self._device)  # [parts, layers]
        self._tables: dict[int, torch.Tensor] = {}  # [parts, layers, 4] in words, by the bytes of a word

    def copy(self, pages: "PageIds", buffer: torch.Tensor, rows: "PageIds", layers: slice, to_buffer: bool) -> None:
        step = math.gcd(self._step, buffer.data_ptr())
        if step not in self._tables:
            self._tables[step] = (self._places // step).transpose(0, 1).contiguous().to(self._device)
        words = buffer[: len(buffer) // step * step].view(WORDS[step])
        at, into = torch.stack([torch.tensor(pages), torch.tensor(rows)]).to(self._device)
        for part, pool in enumerate(self._first):
            heads, width = pool.shape[1], pool.shape[2] * pool.element_size() // step
            pools, places = self._pools[part, layers], self._tables[step][part, layers]
            width_block = triton.next_power_of_2(width)
            block = max(1, min(BLOCK // width_block, triton.next_power_of_2(heads * self._page_size)))
            _copy[len(pages), len(pools), triton.cdiv(heads * self._page_size, block)](
                pools, places, words, at, into,
                heads=heads, page_size=self._page_size, width=width,
                block=block, width_block=width_block, to_buffer=to_buffer,
            )  # fmt: skip
