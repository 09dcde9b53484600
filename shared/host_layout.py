"""Where the bytes of a page lie in host memory (HOST-01).

A *unit* has one checksum: a layer's part, in `page_head` one KV head of it. Its bytes are runs of equal length, in the
order of the device's slots.

    layout              a page, outermost first             a unit is
    page_first_direct   part, layer, token, head, dim       one run
    page_first          part, token, layer, head, dim       a run for each token
    page_head           part, head, token, layer, dim       a run for each token
    layer_first         as page_first_direct on its way to L3 or another host; in a pool each unit of all pages lies
                        side by side, so that a page is in as many places as it has units
"""

import functools
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shared.geometry import ITEM_BYTES, PageGeometry

Bytes = npt.NDArray[np.uint8]


class Unit(NamedTuple):
    """The bytes of one checksum. All but the first two and the last but one are bytes."""

    layer: int
    part: int
    start: int  # of its first run in a page
    stride: int  # from one run to the next
    device_start: int  # of its first run in the layer's buffer, from the page's first slot
    device_stride: int
    runs: int
    run_bytes: int


@functools.lru_cache(maxsize=64)  # a process has one geometry or two
def units_of(geometry: PageGeometry) -> tuple[Unit, ...]:
    """The units of a page, in the order of its checksums."""
    per_head = geometry.layout == "page_head"
    return tuple(
        _unit(geometry, part, layer, head)
        for part, each in enumerate(geometry.parts)
        for layer in range(geometry.layers)
        for head in range(each.heads if per_head else 1)
    )


def _unit(geometry: PageGeometry, part: int, layer: int, head: int) -> Unit:
    size, layers, each = geometry.page_size, geometry.layers, geometry.parts[part]
    start = sum(size * before.token_bytes for before in geometry.parts[:part]) * layers
    token = each.token_bytes
    if geometry.layout == "page_first":
        return Unit(layer, part, start + layer * token, layers * token, 0, token, size, token)
    if geometry.layout == "page_head":
        dim = each.head_dim * ITEM_BYTES[each.dtype]
        first = start + (head * size * layers + layer) * dim
        return Unit(layer, part, first, layers * dim, head * dim, each.heads * dim, size, dim)
    whole = size * token
    return Unit(layer, part, start + layer * whole, whole, 0, whole, 1, whole)


class HostPages:
    """Pages in host memory: a pool's, or some on their way to L3 or another host."""

    def __init__(self, geometry: PageGeometry, memory: Bytes, *, pool: bool) -> None:
        """memory: uint8 [pages, page_bytes], contiguous."""
        self.geometry = geometry
        self.memory = memory
        self.spread = pool and geometry.layout == "layer_first"  # is a page in many places?

    def __len__(self) -> int:
        return len(self.memory)

    def place(self, unit: Unit) -> tuple[int, int]:
        """Bytes from the beginning of the memory to page 0's first run of a unit, and from one page's to the next's."""
        if self.spread:
            return unit.start * len(self), unit.run_bytes
        return unit.start, self.geometry.page_bytes

    def get(self, page: int) -> Bytes:
        """uint8 [page_bytes]: the page as it travels. The memory itself, or a copy of a page in many places."""
        if not self.spread:
            whole: Bytes = self.memory[page]
            return whole
        return np.concatenate([plane[:, page].reshape(-1) for plane in self._planes()])

    def put(self, page: int, data: Bytes) -> None:
        """The opposite of `get`; data: uint8 [page_bytes]."""
        if not self.spread:
            self.memory[page] = data
            return
        at = 0
        for plane in self._planes():
            rows, _, unit = plane.shape
            plane[:, page] = data[at : at + rows * unit].reshape(rows, unit)
            at += rows * unit

    def _planes(self) -> list[Bytes]:
        """Of each part uint8 [layers, pages, unit bytes], where a page is in many places."""
        flat, at, planes = self.memory.reshape(-1), 0, []
        for part in range(len(self.geometry.parts)):
            shape = self.geometry.layers, len(self), self.geometry.unit_bytes(part)
            planes.append(flat[at : at + shape[0] * shape[1] * shape[2]].reshape(shape))
            at += planes[-1].size
        return planes
