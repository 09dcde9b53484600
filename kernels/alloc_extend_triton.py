"""The Triton version of `alloc_extend`. Imported where there is a GPU, and by tests in Triton's interpreter."""

import torch
import triton
import triton.language as tl

BLOCK = 256  # tokens of a program: a chunk of a prompt is a few programs, a decode step one


@triton.jit
def _extend(  # type: ignore[no-untyped-def]
    prefix_lens, seq_lens, last_slots, free_pages, first_pages, first_tokens, slots,
    page_size: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    start = tl.load(prefix_lens + request)
    end = tl.load(seq_lens + request)
    position = start + tl.program_id(1) * block + tl.arange(0, block)
    inside = position < end
    page = position // page_size - (start + page_size - 1) // page_size
    fresh = tl.load(free_pages + tl.load(first_pages + request) + page, mask=inside & (page >= 0), other=0)
    own = tl.load(last_slots + request) + 1 + position - start
    slot = tl.where(page < 0, own, fresh * page_size + position % page_size)
    tl.store(slots + tl.load(first_tokens + request) + position - start, slot, mask=inside)


def extend(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_slots: torch.Tensor,
    free_pages: torch.Tensor,
    first_pages: torch.Tensor,
    first_tokens: torch.Tensor,
    page_size: int,
) -> torch.Tensor:
    """As `alloc_extend`, unchecked. first_pages, first_tokens: int64 [requests], where in `free_pages` and in the
    result each request begins."""
    counts = seq_lens - prefix_lens
    slots = torch.empty(int(counts.sum()), dtype=torch.int64, device=counts.device)
    if len(slots):
        grid = len(counts), triton.cdiv(int(counts.max()), BLOCK)
        _extend[grid](
            prefix_lens, seq_lens, last_slots, free_pages, first_pages, first_tokens, slots,
            page_size=page_size, block=BLOCK,
        )  # fmt: skip
    return slots
