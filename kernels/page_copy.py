"""Copies pages between a device pool and a host pool, with the checksum of every unit.

`PageCopier` chooses between two versions with equal results: C (CPU tensors, the extension is built) and torch
(anything else; the reference). The source is read once: a checksum is always that of the bytes that arrived, so that
a late overwrite of the source can't hide.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from kernels import checksum, native
from kernels.native import Checksums
from shared.errors import GeometryError

if TYPE_CHECKING:
    from torch import Tensor

PageIds = npt.NDArray[np.int64]
HostPages = npt.NDArray[np.uint8]


class _Job(NamedTuple):
    layers: slice
    device_pages: PageIds
    host: HostPages
    host_pages: PageIds
    to_host: bool


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
        self._layers, self._page_size, self._page_bytes = layers, page_size, page_bytes
        self._offsets = np.array(offsets, dtype=np.int64)
        self._addresses = np.array([[each.data_ptr() for each in parts] for parts in layers], dtype=np.int64)
        self._units = [each.nbytes // each.shape[0] * page_size for each in layers[0]]
        self._device_pages = min(each.shape[0] // page_size for parts in layers for each in parts)
        self._on_cpu = all(each.device.type == "cpu" for parts in layers for each in parts)

    def to_host(self, layers: slice, device_pages: PageIds, host: HostPages, host_pages: PageIds) -> Checksums:
        """Copy these layers of device page `device_pages[i]` into host page `host_pages[i]`; CRC32C, uint32
        [n, layers, parts].

        device_pages, host_pages: int64 [n]. host: uint8 [pages, page_bytes], contiguous.

        Raises GeometryError, before any byte moves, for a shape or page id that doesn't fit. The copy has ended when
        the method returns, on any device. The C version holds no GIL meanwhile.
        """
        if not host.flags.writeable:
            raise GeometryError("the host pool is mapped read-only; map it writable to copy pages into it")
        return self._copy(_Job(layers, device_pages, host, host_pages, to_host=True))

    def to_device(self, layers: slice, device_pages: PageIds, host: HostPages, host_pages: PageIds) -> Checksums:
        """Copy these layers of host page `host_pages[i]` into device page `device_pages[i]`: `to_host` turned round,
        with the same arguments, result and errors. The host pool may be mapped read-only."""
        return self._copy(_Job(layers, device_pages, host, host_pages, to_host=False))

    def _copy(self, job: _Job) -> Checksums:
        _check_pages(job, self._device_pages, self._page_bytes)
        extension, _ = native.load()
        return self._by_c(extension, job) if extension and self._on_cpu else self._by_torch(job)

    def _checksums(self, job: _Job) -> Checksums:
        return np.empty((len(job.device_pages), *self._offsets[job.layers].shape), dtype=np.uint32)

    def _by_c(self, extension: native.Native, job: _Job) -> Checksums:
        crc = self._checksums(job)
        pages = job.host.ctypes.data + job.host_pages[:, None] * self._page_bytes
        for part, unit in enumerate(self._units):
            on_device = (self._addresses[job.layers, part] + job.device_pages[:, None] * unit).view(np.uint64).ravel()
            on_host = (self._offsets[job.layers, part] + pages).view(np.uint64).ravel()
            dst, src = (on_host, on_device) if job.to_host else (on_device, on_host)
            crc[:, :, part] = extension.copy_units(dst, src, unit).reshape(crc.shape[:2])
        return crc

    def _by_torch(self, job: _Job) -> Checksums:
        """Through a private copy of each unit, which is what is checksummed and stored."""
        import torch

        crc = self._checksums(job)
        for at, (buffers, offsets) in enumerate(zip(self._layers[job.layers], self._offsets[job.layers], strict=True)):
            for part, (buffer, offset, unit) in enumerate(zip(buffers, offsets, self._units, strict=True)):
                on_device = buffer.view(-1).view(torch.uint8).view(-1, unit)
                on_host = job.host[:, offset : offset + unit]
                for row, (device_page, host_page) in enumerate(zip(job.device_pages, job.host_pages, strict=True)):
                    if job.to_host:
                        data = on_device[device_page].to("cpu", copy=True).numpy()
                        on_host[host_page] = data
                    else:
                        data = on_host[host_page].copy()
                        on_device[device_page].copy_(torch.from_numpy(data))
                    crc[row, at, part] = checksum.crc32c(data)
        return crc


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


def _check_pages(job: _Job, device_pages: int, page_bytes: int) -> None:
    host = job.host
    if host.dtype != np.uint8 or host.ndim != 2 or not host.flags.c_contiguous or host.shape[1] != page_bytes:
        raise GeometryError(
            f"host must be contiguous uint8 [pages, {page_bytes}], got {host.dtype} {host.shape}; map it as such"
        )
    if len(job.device_pages) != len(job.host_pages):
        raise GeometryError(f"{len(job.device_pages)} device pages can't pair with {len(job.host_pages)} host pages")
    _check_ids("device", job.device_pages, device_pages)
    _check_ids("host", job.host_pages, host.shape[0])


def _check_ids(pool: str, pages: PageIds, limit: int) -> None:
    if pages.dtype != np.int64 or pages.ndim != 1:
        raise GeometryError(f"{pool} pages must be int64 [n], got {pages.dtype} {pages.shape}")
    if pages.size and (pages.min() < 0 or pages.max() >= limit):
        raise GeometryError(f"{pool} pages {pages.min()}..{pages.max()} are outside the pool's 0..{limit - 1}")
