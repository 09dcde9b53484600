"""Copies pages of one layer between a device pool and a host pool, with the checksum of every unit.

`copy_device_to_host` and `copy_host_to_device` choose between two versions with equal results: C (CPU tensors, the
extension is built) and torch (anything else; the reference). The source is read once: a checksum is always that of
the bytes that arrived, so that a late overwrite of the source can't hide.
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


class LayerCopy(NamedTuple):
    """What to copy between which pools: the arguments of both directions."""

    layer_buffers: Sequence["Tensor"]
    device_pages: PageIds
    host: HostPages
    host_pages: PageIds
    offsets: Sequence[int]
    page_size: int

    @property
    def checksums(self) -> Checksums:
        """Room for the result: uint32 [n, parts]."""
        return np.empty((len(self.device_pages), len(self.layer_buffers)), dtype=np.uint32)

    def unit_bytes(self, part: int) -> int:
        """Bytes of one page of this layer's `part`."""
        buffer = self.layer_buffers[part]
        return buffer.nbytes // buffer.shape[0] * self.page_size


def copy_device_to_host(
    layer_buffers: Sequence["Tensor"],
    device_pages: PageIds,
    host: HostPages,
    host_pages: PageIds,
    offsets: Sequence[int],
    page_size: int,
) -> Checksums:
    """Copy one layer of device page `device_pages[i]` into host page `host_pages[i]`; uint32 [n, parts]: CRC32C.

    layer_buffers: per part (k, v, ...) that layer's pool, contiguous `[slots, heads, head_dim]`; page p is the slots
    from `p * page_size`. device_pages, host_pages: int64 [n]. host: uint8 [pages, page_bytes], contiguous. offsets:
    per part, the byte offset of this (layer, part) unit inside a host page.

    Raises GeometryError, before any byte moves, for a shape, page id or offset that doesn't fit. The copy has ended
    when the function returns, on any device. The C version holds no GIL meanwhile.
    """
    job = LayerCopy(layer_buffers, device_pages, host, host_pages, offsets, page_size)
    if not host.flags.writeable:
        raise GeometryError("the host pool is mapped read-only; map it writable to copy pages into it")
    return _copy(job, to_host=True)


def copy_host_to_device(
    layer_buffers: Sequence["Tensor"],
    device_pages: PageIds,
    host: HostPages,
    host_pages: PageIds,
    offsets: Sequence[int],
    page_size: int,
) -> Checksums:
    """Copy one layer of host page `host_pages[i]` into device page `device_pages[i]`: `copy_device_to_host` turned
    round, with the same arguments, result and errors. The host pool may be mapped read-only."""
    return _copy(LayerCopy(layer_buffers, device_pages, host, host_pages, offsets, page_size), to_host=False)


def which() -> str:
    """The version that runs for CPU tensors, and why."""
    extension, reason = native.load()
    return f"C ({reason})" if extension else f"torch (C: {reason})"


def _copy(job: LayerCopy, to_host: bool) -> Checksums:
    _check(job)
    extension, _ = native.load()
    if extension and all(buffer.device.type == "cpu" for buffer in job.layer_buffers):
        return _copy_by_c(extension, job, to_host)
    return _copy_by_torch(job, to_host)


def _copy_by_c(extension: native.Native, job: LayerCopy, to_host: bool) -> Checksums:
    crc = job.checksums
    for part, (buffer, offset) in enumerate(zip(job.layer_buffers, job.offsets, strict=True)):
        unit = job.unit_bytes(part)
        on_device = (buffer.data_ptr() + job.device_pages * unit).astype(np.uint64)
        on_host = (job.host.ctypes.data + job.host_pages * job.host.shape[1] + offset).astype(np.uint64)
        dst, src = (on_host, on_device) if to_host else (on_device, on_host)
        crc[:, part] = extension.copy_units(dst, src, unit)
    return crc


def _copy_by_torch(job: LayerCopy, to_host: bool) -> Checksums:
    """Through a private copy of each unit, which is what is checksummed and stored."""
    import torch

    crc = job.checksums
    for part, (buffer, offset) in enumerate(zip(job.layer_buffers, job.offsets, strict=True)):
        size = job.unit_bytes(part)
        on_device = buffer.view(-1).view(torch.uint8).view(-1, size)
        on_host = job.host[:, offset : offset + size]
        for row, (device_page, host_page) in enumerate(zip(job.device_pages, job.host_pages, strict=True)):
            if to_host:
                unit = on_device[device_page].to("cpu", copy=True).numpy()
                on_host[host_page] = unit
            else:
                unit = on_host[host_page].copy()
                on_device[device_page].copy_(torch.from_numpy(unit))
            crc[row, part] = checksum.crc32c(unit)
    return crc


# ---- checks: the C version trusts every address that it is given ----


def _check(job: LayerCopy) -> None:
    host, page_size = job.host, job.page_size
    if host.dtype != np.uint8 or host.ndim != 2 or not host.flags.c_contiguous:
        raise GeometryError(f"host must be contiguous uint8 [pages, page_bytes], got {host.dtype} {host.shape}")
    if len(job.offsets) != len(job.layer_buffers) or page_size < 1:
        raise GeometryError(f"{len(job.layer_buffers)} parts, {len(job.offsets)} offsets, {page_size=}: must match")
    if len(job.device_pages) != len(job.host_pages):
        raise GeometryError(f"{len(job.device_pages)} device pages can't pair with {len(job.host_pages)} host pages")
    _check_ids("host", job.host_pages, host.shape[0])
    for part, (buffer, offset) in enumerate(zip(job.layer_buffers, job.offsets, strict=True)):
        if not buffer.is_contiguous() or not buffer.nbytes or buffer.shape[0] % page_size:
            raise GeometryError(
                f"part {part}: {tuple(buffer.shape)} is not contiguous whole pages of {page_size} slots"
            )
        _check_ids("device", job.device_pages, buffer.shape[0] // page_size)
        end = offset + job.unit_bytes(part)
        if offset < 0 or end > host.shape[1]:
            raise GeometryError(f"part {part}: bytes {offset}..{end} are outside a page of {host.shape[1]} bytes")


def _check_ids(pool: str, pages: PageIds, limit: int) -> None:
    if pages.dtype != np.int64 or pages.ndim != 1:
        raise GeometryError(f"{pool} pages must be int64 [n], got {pages.dtype} {pages.shape}")
    if pages.size and (pages.min() < 0 or pages.max() >= limit):
        raise GeometryError(f"{pool} pages {pages.min()}..{pages.max()} are outside the pool's 0..{limit - 1}")
