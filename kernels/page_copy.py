"""Copies pages between a device pool and a host pool, with the checksum of every unit.

`PageCopier` chooses between two versions with equal results: C (CPU tensors, the extension is built) and torch
(anything else; the reference). The source is read once: a checksum is always that of the bytes that arrived, so that
a late overwrite of the source can't hide.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kernels import checksum, native
from kernels.native import Checksums, PageIds
from shared.errors import GeometryError

if TYPE_CHECKING:
    from torch import Tensor

HostPages = npt.NDArray[np.uint8]
ALL = slice(None)


class PageCopier:
    """The copies of one device pool. What never changes is checked and computed once: it would take longer than the
    copy of a layer's pages does."""

    def __init__(
        self, layers: Sequence[Sequence["Tensor"]], offsets: Sequence[Sequence[int]], page_size: int, page_bytes: int
    ) -> None:
        """layers: per layer and part (k, v, ...) that layer's pool, contiguous `[slots, heads, head_dim]`, which must
        live as long as this; page p is the slots from `p * page_size`. offsets: the same nesting, the byte offset of
        the (layer, part) unit inside a host page of `page_bytes`.

        Raises GeometryError for a shape or an offset that doesn't fit.
        """
        _check_buffers(layers, offsets, page_size, page_bytes)
        self.layers, self.offsets, self.page_bytes = layers, np.array(offsets, dtype=np.int64), page_bytes
        self.units = [each.nbytes // each.shape[0] * page_size for each in layers[0]]
        self.device_pages = min(each.shape[0] // page_size for parts in layers for each in parts)
        self.on_cpu = all(each.device.type == "cpu" for parts in layers for each in parts)
        addresses = np.array([[each.data_ptr() for each in parts] for parts in layers], dtype=np.int64)
        per_place = (addresses, self.offsets, np.full_like(addresses, page_bytes), np.array([self.units] * len(layers)))
        self.places = np.ascontiguousarray(np.stack(per_place, axis=-1))  # [layers, parts, 4], for `copy_pages`

    def to_host(self, device_pages: PageIds, host: HostPages, host_pages: PageIds) -> "PageCopy":
        """The copy of device page `device_pages[i]` into host page `host_pages[i]`; nothing moves yet.

        device_pages, host_pages: int64 [n]. host: uint8 [pages, page_bytes], contiguous.

        Raises GeometryError for a shape or page id that doesn't fit.
        """
        if not host.flags.writeable:
            raise GeometryError("the host pool is mapped read-only; map it writable to copy pages into it")
        return PageCopy(self, device_pages, host, host_pages, to_host=True)

    def to_device(self, device_pages: PageIds, host: HostPages, host_pages: PageIds) -> "PageCopy":
        """The copy of host page `host_pages[i]` into device page `device_pages[i]`: `to_host` turned round, with the
        same arguments and errors. The host pool may be mapped read-only."""
        return PageCopy(self, device_pages, host, host_pages, to_host=False)


class PageCopy:
    """Pages to copy, checked once and copied part by part: a load copies them layer by layer."""

    def __init__(
        self, copier: PageCopier, device_pages: PageIds, host: HostPages, host_pages: PageIds, to_host: bool
    ) -> None:
        _check_host(host, copier.page_bytes)
        if len(device_pages) != len(host_pages):
            raise GeometryError(f"{len(device_pages)} device pages can't pair with {len(host_pages)} host pages")
        _check_ids("device", device_pages, copier.device_pages)
        _check_ids("host", host_pages, host.shape[0])
        self._copier, self._host, self._address, self._to_host = copier, host, host.ctypes.data, to_host
        self._device_pages, self._host_pages = map(np.ascontiguousarray, (device_pages, host_pages))
        extension, _ = native.load()
        self._extension = extension if copier.on_cpu else None

    def run(self, layers: slice, pages: slice = ALL) -> Checksums:
        """Copy these layers of these pages (`pages` counts in the lists); CRC32C, uint32 [n, layers, parts].

        The copy has ended when the method returns, on any device. The C version holds no GIL meanwhile.
        """
        copier, device_pages = self._copier, self._device_pages[pages]
        places = copier.places[layers]
        crc: Checksums = np.empty((len(device_pages), *places.shape[:2]), dtype=np.uint32)
        if self._extension is None:
            self._by_torch(layers, device_pages, self._host_pages[pages], crc)
        else:
            places = places.reshape(-1, places.shape[-1])
            host_pages = self._host_pages[pages]
            self._extension.copy_pages(self._address, places, device_pages, host_pages, crc, self._to_host)
        return crc

    def _by_torch(self, layers: slice, device_pages: PageIds, host_pages: PageIds, crc: Checksums) -> None:
        """Through a private copy of each unit, which is what is checksummed and stored."""
        import torch

        copier = self._copier
        for at, (buffers, offsets) in enumerate(zip(copier.layers[layers], copier.offsets[layers], strict=True)):
            for part, (buffer, offset, unit) in enumerate(zip(buffers, offsets, copier.units, strict=True)):
                on_device = buffer.view(-1).view(torch.uint8).view(-1, unit)
                on_host = self._host[:, offset : offset + unit]
                for row, (device_page, host_page) in enumerate(zip(device_pages, host_pages, strict=True)):
                    if self._to_host:
                        data = on_device[device_page].to("cpu", copy=True).numpy()
                        on_host[host_page] = data
                    else:
                        data = on_host[host_page].copy()
                        on_device[device_page].copy_(torch.from_numpy(data))
                    crc[row, at, part] = checksum.crc32c(data)


def which() -> str:
    """The version that runs for CPU tensors, and why."""
    extension, reason = native.load()
    return f"C ({reason})" if extension else f"torch (C: {reason})"


# ---- checks: the C version trusts every address that it is given ----


def _check_buffers(
    layers: Sequence[Sequence["Tensor"]], offsets: Sequence[Sequence[int]], page_size: int, page_bytes: int
) -> None:
    shapes = [len(parts) for parts in layers], [len(each) for each in offsets]
    if shapes[0] != shapes[1] or not layers or len(set(shapes[0])) != 1 or page_size < 1:
        raise GeometryError(f"layers of {shapes[0]} parts, of {shapes[1]} offsets, {page_size=}: must match")
    for layer, parts in enumerate(layers):
        for part, (buffer, offset) in enumerate(zip(parts, offsets[layer], strict=True)):
            if not buffer.is_contiguous() or not buffer.nbytes or buffer.shape[0] % page_size:
                shape = tuple(buffer.shape)
                raise GeometryError(
                    f"layer {layer} part {part}: {shape} is not contiguous whole pages of {page_size} slots"
                )
            if (buffer.shape, buffer.dtype) != (layers[0][part].shape, layers[0][part].dtype):
                raise GeometryError(f"layer {layer} part {part}: {tuple(buffer.shape)} differs from layer 0's")
            end = offset + buffer.nbytes // buffer.shape[0] * page_size
            if offset < 0 or end > page_bytes:
                raise GeometryError(
                    f"layer {layer} part {part}: bytes {offset}..{end} are outside a page of {page_bytes} bytes"
                )


def _check_host(host: HostPages, page_bytes: int) -> None:
    if host.dtype != np.uint8 or host.ndim != 2 or not host.flags.c_contiguous or host.shape[1] != page_bytes:
        raise GeometryError(
            f"host must be contiguous uint8 [pages, {page_bytes}], got {host.dtype} {host.shape}; map it as such"
        )


def _check_ids(pool: str, pages: PageIds, limit: int) -> None:
    if pages.dtype != np.int64 or pages.ndim != 1:
        raise GeometryError(f"{pool} pages must be int64 [n], got {pages.dtype} {pages.shape}")
    if pages.size and (pages.min() < 0 or pages.max() >= limit):
        raise GeometryError(f"{pool} pages {pages.min()}..{pages.max()} are outside the pool's 0..{limit - 1}")
