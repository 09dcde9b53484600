"""Slots for the new tokens of a batch of requests (ALLOC-09): the last page is filled up, then fresh pages in order.

    page_size 4, prefix 6, sequence 13:   | p p p p | p p x x | x x x x | x . . . |
                                                      own page   fresh     fresh

`alloc_extend` chooses between two versions with equal results: Triton for tensors on a GPU, torch for all others (the
reference). The layout is that of SGLang's kernel of this name.
"""

from typing import TYPE_CHECKING

from kernels.gpu import triton_version
from shared.errors import CapacityError, GeometryError

if TYPE_CHECKING:
    from torch import Tensor


def alloc_extend(
    prefix_lens: "Tensor", seq_lens: "Tensor", last_slots: "Tensor", free_pages: "Tensor", page_size: int
) -> "Tensor":
    """int64 [tokens]: the slots of tokens prefix_lens[i] .. seq_lens[i] - 1, request after request.

    All are int64 [requests] on one device: tokens that have slots, tokens that shall have, and the slot of token
    prefix_lens[i] - 1 (not read where the prefix ends on a page's border). free_pages: int64 [pages], page ids to be
    taken from the front; request i takes pages_needed(...)[i] of them.

    Raises CapacityError naming the shortage, and GeometryError for shapes or lengths that don't fit: never a part.
    """
    if not prefix_lens.shape == seq_lens.shape == last_slots.shape or prefix_lens.ndim != 1 or page_size < 1:
        shapes = f"{tuple(prefix_lens.shape)}, {tuple(seq_lens.shape)}, {tuple(last_slots.shape)}"
        raise GeometryError(f"prefix_lens, seq_lens and last_slots are {shapes}, {page_size=}; pass one per request")
    if bool((seq_lens < prefix_lens).any()):
        raise GeometryError("a sequence is shorter than its prefix; an extension adds tokens")
    needed = pages_needed(prefix_lens, seq_lens, page_size)
    short = int(needed.sum()) - len(free_pages)
    if short > 0:
        raise CapacityError(f"{len(free_pages)} free pages are short by {short}; evict as many first")
    first_pages, first_tokens = needed.cumsum(0) - needed, (seq_lens - prefix_lens).cumsum(0) - seq_lens + prefix_lens
    if (triton := triton_version("alloc_extend", prefix_lens)) is not None:
        slots: Tensor = triton.extend(
            prefix_lens, seq_lens, last_slots, free_pages, first_pages, first_tokens, page_size
        )
        return slots
    return _by_torch(prefix_lens, seq_lens, last_slots, free_pages, first_pages, first_tokens, page_size)


def pages_needed(prefix_lens: "Tensor", seq_lens: "Tensor", page_size: int) -> "Tensor":
    """int64 [requests]: fresh pages of each request."""
    return _pages(seq_lens, page_size) - _pages(prefix_lens, page_size)


def _pages(tokens: "Tensor", page_size: int) -> "Tensor":
    return (tokens + page_size - 1) // page_size


def _by_torch(
    prefix_lens: "Tensor",
    seq_lens: "Tensor",
    last_slots: "Tensor",
    free_pages: "Tensor",
    first_pages: "Tensor",
    first_tokens: "Tensor",
    page_size: int,
) -> "Tensor":
    import torch

    counts = seq_lens - prefix_lens
    request = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
    prefix = prefix_lens[request]
    position = prefix + torch.arange(len(request), device=counts.device) - first_tokens[request]
    page = position // page_size - _pages(prefix, page_size)  # among the fresh ones of its request; below 0 its own
    own = last_slots[request] + 1 + position - prefix
    if not len(free_pages):
        return own
    fresh = free_pages[(first_pages[request] + page).clamp(min=0, max=len(free_pages) - 1)]
    return torch.where(page < 0, own, fresh * page_size + position % page_size)
