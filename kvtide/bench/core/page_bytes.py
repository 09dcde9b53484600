"""The memory of our side's tiered rows: device and host pages of a small model in this process, and the copies and
checks that a worker makes of them. With all of it in one thread nothing is copied beside something else."""

import numpy as np
import numpy.typing as npt

from kernels.page_copy import PageCopier
from services.gpu_worker.kv_pool import KVPool
from shared.errors import IntegrityError
from shared.geometry import PageGeometry, Part
from shared.host_layout import HostPages
from shared.messages.storage import CommitPages, ReleasePages
from shared.messages.worker import LoadPages, WritePages
from shared.packed import unpack
from shared.page_hash import DIGEST_BYTES

LAYERS, HEADS, HEAD_DIM, DTYPE = 2, 1, 8, "float16"  # the peer's rows have the same: 4 KiB a page of 64 tokens
ALL = slice(None)


def geometry(page_size: int) -> PageGeometry:
    """Of the tiered rows' pages."""
    return PageGeometry(page_size, LAYERS, tuple(Part(name, HEADS, HEAD_DIM, DTYPE) for name in ("k", "v")))


class PageBytes:
    """One worker's device pool, one storage's host pool, and the names and checksums of the host pages."""

    def __init__(self, page_size: int, device_pages: int, host_pages: int) -> None:
        """Pages of both pools, page 0 included."""
        shape = geometry(page_size)
        self._pool = KVPool(shape, device_pages)
        buffers = [self._pool.layer_buffers(layer) for layer in range(shape.layers)]
        self._copier = PageCopier(buffers, shape)
        self._units = np.array(self._copier.units)
        self.host = np.zeros((host_pages, shape.page_bytes), np.uint8)
        self._host = HostPages(shape, self.host, pool=True)
        self._names = np.zeros((host_pages, DIGEST_BYTES), np.uint8)
        self._checksums = np.zeros((host_pages, shape.units), np.uint32)
        self._device = [
            each.numpy().view(np.uint8).reshape(device_pages, -1) for parts_of in buffers for each in parts_of
        ]

    def write(self, command: WritePages) -> bytes:
        """Copy device pages into host pages; their checksums, page by page, for WriteDone."""
        host_pages = _ids(command.host_pages)
        copied = self._copier.to_host(_ids(command.device_pages), self._host, host_pages).run(ALL)
        checksums = np.empty((len(host_pages), self._units.size), "<u4")
        checksums[:, self._units] = copied
        return checksums.tobytes()

    def commit(self, command: CommitPages) -> None:
        """Name host pages."""
        pages = _ids(command.pages)
        self._names[pages] = np.frombuffer(command.digests, np.uint8).reshape(len(pages), -1)
        self._checksums[pages] = np.frombuffer(command.checksums, "<u4").reshape(len(pages), -1)

    def release(self, command: ReleasePages) -> None:
        """Take their names back."""
        self._names[_ids(command.pages)] = 0

    def load(self, command: LoadPages) -> None:
        """Copy host pages into device pages, layer by layer. Raises IntegrityError for a page of another name, or with
        other bytes than were written."""
        pages = _ids(command.host_pages)
        if self._names[pages].tobytes() != command.digests:
            raise IntegrityError(f"of host pages {pages.tolist()} some have another name")
        expected = self._checksums[pages]
        copy = self._copier.to_device(_ids(command.device_pages), self._host, pages)
        for layer in (slice(each, each + 1) for each in range(LAYERS)):
            if (copy.run(layer) != expected[:, self._units[self._copier.of_layers(layer)]]).any():
                raise IntegrityError(f"of host pages {pages.tolist()} some have other bytes than were written")

    def fill(self, page: int, content: bytes) -> None:
        """Give a device page its bytes, unit after unit: what a forward pass would do."""
        for unit, data in zip(self._device, np.frombuffer(content, np.uint8).reshape(LAYERS * 2, -1), strict=True):
            unit[page] = data

    def content(self, page: int) -> bytes:
        """The bytes of a device page, in the same order."""
        return b"".join(unit[page].tobytes() for unit in self._device)


def _ids(packed: bytes) -> npt.NDArray[np.int64]:
    return unpack(packed).astype(np.int64)
