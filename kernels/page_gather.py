"""Pages between the layers' pools on a GPU and one buffer beside them, in any host layout, for copies that go through
a staging buffer.

A *unit* is one part (k, v, ...) of one layer of one page: [page_size, heads, head_dim] elements, contiguous in the
pool. In the buffer, strides say where each head's elements go, so that one kernel serves every layout:

    page_first_direct   page: part, layer, token, head       page_first   page: part, token, layer, head
    layer_first         part, layer, page, token, head       page_head    page: part, head, token, layer

`PageGather` chooses between two versions with equal results: Triton for pools on a GPU, torch for all others (the
reference). Elements are copied as bytes and never looked at.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from kernels.gpu import triton_version
from kernels.native import PageIds
from shared.errors import GeometryError

if TYPE_CHECKING:
    from torch import Tensor

ALL = slice(None)


class Place(NamedTuple):
    """Where the units of one layer and part lie in a buffer: element d of head h of token t in row r begins at
    offset + r * row + h * head + t * token + d * (bytes of an element). All in bytes."""

    offset: int
    row: int  # from one page's to the next one's
    head: int
    token: int


class PageGather:
    """The copies of one device's pools. What never changes is checked and computed once."""

    def __init__(self, layers: Sequence[Sequence["Tensor"]], places: Sequence[Sequence[Place]], page_size: int) -> None:
        """layers: per layer and part that layer's pool, contiguous `[slots, heads, head_dim]`, all on one device, which
        must live as long as this; page p is the slots from `p * page_size`. places: the same nesting.

        Raises GeometryError for pools or places that don't fit.
        """
        if not layers or page_size < 1 or [len(parts) for parts in layers] != [len(each) for each in places]:
            raise GeometryError(f"{len(layers)} layers, {len(places)} of places, {page_size=}: must match")
        for layer, parts in enumerate(layers):
            _check_layer(layer, parts, layers[0], places[layer], page_size)
        self.layers, self.places, self.page_size = layers, places, page_size
        self.device = layers[0][0].device
        self.device_pages = min(each.shape[0] // page_size for each in layers[0])
        triton = triton_version("page_gather", layers[0][0])
        self._triton = None if triton is None else triton.Gather(layers, places, page_size)

    def gather(self, pages: PageIds, buffer: "Tensor", rows: PageIds | None = None, layers: slice = ALL) -> None:
        """Copy device page `pages[i]` of these layers into row `rows[i]` of the buffer (row i when there are none).

        pages, rows: int64 [n]; rows differ from each other. buffer: uint8 [bytes], contiguous, on the pools' device, or
        pinned memory of the host. On a GPU the copy is queued on the current stream.

        Raises GeometryError for page ids, rows or a buffer that don't fit.
        """
        self._copy(pages, buffer, rows, layers, to_buffer=True)

    def scatter(self, pages: PageIds, buffer: "Tensor", rows: PageIds | None = None, layers: slice = ALL) -> None:
        """Copy row `rows[i]` of the buffer into device page `pages[i]`: `gather` turned round, with the same arguments
        and errors; pages differ from each other."""
        self._copy(pages, buffer, rows, layers, to_buffer=False)

    def _copy(self, pages: PageIds, buffer: "Tensor", rows: PageIds | None, layers: slice, *, to_buffer: bool) -> None:
        rows = np.arange(len(pages)) if rows is None else rows
        if len(pages) != len(rows):
            raise GeometryError(f"{len(pages)} pages can't pair with {len(rows)} rows")
        _check_ids("pages", pages, self.device_pages)
        _check_ids("rows", rows, self._rows_in(buffer, layers))
        if not len(pages):
            return
        if self._triton is not None:
            self._triton.copy(pages, buffer, rows, layers, to_buffer)
        else:
            self._by_torch(pages, buffer, rows, layers, to_buffer)

    def _rows_in(self, buffer: "Tensor", layers: slice) -> int:
        """Rows that the buffer has room for, of the unit that reaches furthest."""
        import torch

        if buffer.dtype != torch.uint8 or buffer.ndim != 1 or not buffer.is_contiguous():
            raise GeometryError(f"the buffer is {buffer.dtype} {tuple(buffer.shape)}; pass contiguous uint8 [bytes]")
        if buffer.device != self.device and not (self.device.type == "cuda" and buffer.is_pinned()):
            raise GeometryError(f"the buffer is on {buffer.device}, the pools on {self.device}; put it there or pin it")
        found = []
        for parts, places in zip(self.layers[layers], self.places[layers], strict=True):
            for pool, place in zip(parts, places, strict=True):
                room = len(buffer) - place.offset - _unit_end(pool, place, self.page_size)
                found.append(room // place.row + 1 if room >= 0 else 0)
        return min(found, default=0)

    def _by_torch(self, pages: PageIds, buffer: "Tensor", rows: PageIds, layers: slice, to_buffer: bool) -> None:
        import torch

        at, into = torch.tensor(pages, device=self.device), torch.tensor(rows, device=buffer.device)
        for parts, places in zip(self.layers[layers], self.places[layers], strict=True):
            for pool, place in zip(parts, places, strict=True):
                units = pool.view(torch.uint8).view(-1, self.page_size, *_head_shape(pool))
                shape = int(rows.max()) + 1, *units.shape[1:]
                strides = place.row, place.token, place.head, 1
                placed = buffer.as_strided(shape, strides, buffer.storage_offset() + place.offset)
                if to_buffer:
                    placed[into] = units[at].to(buffer.device)
                else:
                    units[at] = placed[into].to(self.device)


def staged(layers: Sequence[Sequence["Tensor"]], page_size: int, *, one_layer: bool = False) -> list[list[Place]]:
    """The places of a contiguous buffer [n, layers, parts, bytes of a unit], in which a unit has the pool's order; with
    `one_layer` of [n, parts, bytes of a unit], which layer after layer goes through."""
    parts = layers[0]
    units = [each.nbytes // each.shape[0] * page_size for each in parts]
    before = [sum(units[:part]) for part in range(len(parts))]
    row = sum(units) * (1 if one_layer else len(layers))
    return [
        [
            Place(start + (0 if one_layer else layer * sum(units)), row, head, heads * head)
            for start, (heads, head) in zip(before, map(_head_shape, parts), strict=True)
        ]
        for layer in range(len(layers))
    ]


def _head_shape(pool: "Tensor") -> tuple[int, int]:
    """Heads, and bytes of one head of one token."""
    return pool.shape[1], pool.shape[2] * pool.element_size()


def _unit_end(pool: "Tensor", place: Place, page_size: int) -> int:
    """Bytes from a unit's first to behind its last."""
    heads, head_bytes = _head_shape(pool)
    return (heads - 1) * place.head + (page_size - 1) * place.token + head_bytes


def _check_layer(
    layer: int, parts: Sequence["Tensor"], first: Sequence["Tensor"], places: Sequence[Place], page_size: int
) -> None:
    for part, (pool, place) in enumerate(zip(parts, places, strict=True)):
        if pool.ndim != 3 or not pool.is_contiguous() or not pool.nbytes or pool.shape[0] % page_size:
            shape = tuple(pool.shape)
            raise GeometryError(
                f"layer {layer} part {part}: {shape} is not contiguous whole pages of {page_size} slots"
            )
        same = first[part]
        if (pool.shape, pool.dtype, pool.device) != (same.shape, same.dtype, first[0].device):
            raise GeometryError(
                f"layer {layer} part {part}: {tuple(pool.shape)} {pool.dtype} on {pool.device} differs from layer 0's"
            )
        if place.offset < 0 or min(place.row, place.head, place.token) < 1:
            raise GeometryError(f"layer {layer} part {part}: {place}: strides are positive, offsets not negative")


def _check_ids(what: str, ids: npt.NDArray[np.int64], limit: int) -> None:
    if ids.dtype != np.int64 or ids.ndim != 1:
        raise GeometryError(f"{what} must be int64 [n], got {ids.dtype} {ids.shape}")
    if ids.size and (ids.min() < 0 or ids.max() >= limit):
        raise GeometryError(f"{what} {ids.min()}..{ids.max()} are outside 0..{limit - 1}")
