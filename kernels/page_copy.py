"""Copies pages between a device pool and a host pool, with the checksum of every unit (`shared.host_layout`).

`PageCopier` chooses between two versions with equal results: C (CPU tensors, the extension is built) and torch
(anything else; the reference). The source is read once: a checksum is always that of the bytes that arrived, so that
a late overwrite of the source can't hide.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kernels import checksum, native
from kernels.native import Checksums, PageIds, Places
from shared.errors import GeometryError
from shared.geometry import PageGeometry
from shared.host_layout import HostPages, Unit, units_of

if TYPE_CHECKING:
    from torch import Tensor

ALL = slice(None)
KEPT = 8  # host pools whose places are kept: a segment of each storage, or of a few


class PageCopier:
    """The copies of one device pool. What never changes is checked and computed once: it would take longer than the
    copy of a layer's pages does."""

    def __init__(self, layers: Sequence[Sequence["Tensor"]], geometry: PageGeometry) -> None:
        """layers: per layer and part (k, v, ...) that layer's pool, contiguous `[slots, heads, head_dim]`, which must
        live as long as this; page p is the slots from `p * page_size`.

        Raises GeometryError for a pool that isn't the geometry's.
        """
        _check_buffers(layers, geometry)
        self.layers, self.geometry = layers, geometry
        self.units = sorted(range(geometry.units), key=lambda index: units_of(geometry)[index].layer)
        self.ordered = [units_of(geometry)[index] for index in self.units]
        self._starts = np.searchsorted([unit.layer for unit in self.ordered], range(geometry.layers + 1))
        self.device_pages = min(each.shape[0] for parts in layers for each in parts) // geometry.page_size
        self.on_cpu = all(each.device.type == "cpu" for parts in layers for each in parts)
        self._places: dict[int, Places] = {}

    def of_layers(self, layers: slice) -> slice:
        """Which of `units` and `ordered` are theirs: both go layer by layer."""
        first, last, _ = layers.indices(self.geometry.layers)
        return slice(int(self._starts[first]), int(self._starts[last]))

    def to_host(self, device_pages: PageIds, host: HostPages, host_pages: PageIds) -> "PageCopy":
        """The copy of device page `device_pages[i]` into host page `host_pages[i]`; nothing moves yet.

        device_pages, host_pages: int64 [n].

        Raises GeometryError for a shape or page id that doesn't fit.
        """
        if not host.memory.flags.writeable:
            raise GeometryError("the host pool is mapped read-only; map it writable to copy pages into it")
        return PageCopy(self, device_pages, host, host_pages, to_host=True)

    def to_device(self, device_pages: PageIds, host: HostPages, host_pages: PageIds) -> "PageCopy":
        """The copy of host page `host_pages[i]` into device page `device_pages[i]`: `to_host` turned round, with the
        same arguments and errors. The host pool may be mapped read-only."""
        return PageCopy(self, device_pages, host, host_pages, to_host=False)

    def places(self, host: HostPages) -> Places:
        """int64 [units, 8], in the order of `ordered`: where each unit lies, for `copy_pages`."""
        pages = len(host) if host.spread else 0  # only there it matters
        found = self._places.get(pages)
        if found is None:
            if len(self._places) >= KEPT:
                self._places.clear()
            found = self._places[pages] = np.array([self._place(host, unit) for unit in self.ordered], dtype=np.int64)
        return found

    def _place(self, host: HostPages, unit: Unit) -> tuple[int, ...]:
        address = self.layers[unit.layer][unit.part].data_ptr() + unit.device_start
        on_device = address, self.geometry.unit_bytes(unit.part), unit.device_stride
        return (*on_device, *host.place(unit), unit.stride, unit.runs, unit.run_bytes)


class PageCopy:
    """Pages to copy, checked once and copied part by part: a load copies them layer by layer."""

    def __init__(
        self, copier: PageCopier, device_pages: PageIds, host: HostPages, host_pages: PageIds, to_host: bool
    ) -> None:
        _check_host(host.memory, copier.geometry.page_bytes)
        if len(device_pages) != len(host_pages):
            raise GeometryError(f"{len(device_pages)} device pages can't pair with {len(host_pages)} host pages")
        _check_ids("device", device_pages, copier.device_pages)
        _check_ids("host", host_pages, len(host))
        self._copier, self._host, self._to_host = copier, host, to_host
        self._address = host.memory.ctypes.data
        self._device_pages, self._host_pages = map(np.ascontiguousarray, (device_pages, host_pages))
        extension, _ = native.load()
        self._extension = extension if copier.on_cpu else None
        self._places = copier.places(host)

    def run(self, layers: slice, pages: slice = ALL) -> Checksums:
        """Copy these layers of these pages (`pages` counts in the lists); CRC32C, uint32 [n, units], those of the
        copier's `units[copier.of_layers(layers)]`.

        The copy has ended when the method returns, on any device. The C version holds no GIL meanwhile.
        """
        units = self._copier.of_layers(layers)
        places, device_pages, host_pages = self._places[units], self._device_pages[pages], self._host_pages[pages]
        crc: Checksums = np.empty((len(device_pages), len(places)), dtype=np.uint32)
        if self._extension is None:
            for column, unit in enumerate(self._copier.ordered[units]):
                crc[:, column] = self._by_torch(unit, device_pages, host_pages)
        else:
            self._extension.copy_pages(self._address, places, device_pages, host_pages, crc, self._to_host)
        return crc

    def _by_torch(self, unit: Unit, device_pages: PageIds, host_pages: PageIds) -> list[int]:
        """Through a private copy of each unit, which is what is checksummed and stored."""
        import torch

        copier, found = self._copier, []
        on_device = copier.layers[unit.layer][unit.part].view(-1).view(torch.uint8)
        on_host = self._host.memory.reshape(-1)
        first, page_stride = self._host.place(unit)
        runs, run = np.arange(unit.runs)[:, None], np.arange(unit.run_bytes)
        for device_page, host_page in zip(device_pages, host_pages, strict=True):
            here = device_page * copier.geometry.unit_bytes(unit.part) + unit.device_start
            slots = torch.from_numpy(here + runs * unit.device_stride + run).to(on_device.device)
            places = first + host_page * page_stride + runs * unit.stride + run
            if self._to_host:
                data = on_device[slots].cpu().numpy()
                on_host[places] = data
            else:
                data = on_host[places]
                on_device[slots] = torch.from_numpy(data).to(on_device.device)
            found.append(checksum.crc32c(data))
        return found


def which() -> str:
    """The version that runs for CPU tensors, and why."""
    extension, reason = native.load()
    return f"C ({reason})" if extension else f"torch (C: {reason})"


# ---- checks: the C version trusts every address that it is given ----


def _check_buffers(layers: Sequence[Sequence["Tensor"]], geometry: PageGeometry) -> None:
    parts = [len(each) for each in layers]
    if parts != [len(geometry.parts)] * geometry.layers:
        raise GeometryError(f"layers of {parts} parts: the geometry has {geometry.layers} of {len(geometry.parts)}")
    for layer, buffers in enumerate(layers):
        for part, buffer in enumerate(buffers):
            shape, wanted = tuple(buffer.shape), geometry.parts[part].token_bytes
            if not buffer.is_contiguous() or not buffer.nbytes or shape[0] % geometry.page_size:
                raise GeometryError(
                    f"layer {layer} part {part}: {shape} is not contiguous whole pages of {geometry.page_size} slots"
                )
            if buffer.nbytes != shape[0] * wanted:
                raise GeometryError(
                    f"layer {layer} part {part}: a slot of {shape}, {buffer.dtype}, has {buffer.nbytes // shape[0]} "
                    f"bytes and the geometry's has {wanted}"
                )


def _check_host(host: npt.NDArray[np.uint8], page_bytes: int) -> None:
    if host.dtype != np.uint8 or host.ndim != 2 or not host.flags.c_contiguous or host.shape[1] != page_bytes:
        raise GeometryError(
            f"host must be contiguous uint8 [pages, {page_bytes}], got {host.dtype} {host.shape}; map it as such"
        )


def _check_ids(pool: str, pages: PageIds, limit: int) -> None:
    if pages.dtype != np.int64 or pages.ndim != 1:
        raise GeometryError(f"{pool} pages must be int64 [n], got {pages.dtype} {pages.shape}")
    if pages.size and (pages.min() < 0 or pages.max() >= limit):
        raise GeometryError(f"{pool} pages {pages.min()}..{pages.max()} are outside the pool's 0..{limit - 1}")
