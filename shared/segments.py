"""Host-pool segments: shared memory that a storage creates and workers map. `segment_files` names their files.

A page has a name (digest and checksums) between CommitPages and the ack of ReleasePages.
"""

import contextlib
import errno
import mmap
import os
import struct
import weakref
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shared.errors import CapacityError, SegmentError
from shared.geometry import PageGeometry
from shared.host_layout import Bytes, HostPages
from shared.messages.storage import SegmentInfo
from shared.page_hash import DIGEST_BYTES
from shared.segment_files import allocate, hold_lock, lock_path, names_path, open_map, release_lock, segment_path

Checksums = npt.NDArray[np.uint32]
PageIds = npt.NDArray[np.int32]
NameRows = npt.NDArray[np.void]

MAGIC = b"KVTIDESG"
VERSION = 1  # of the header and the name table
HEADER = struct.Struct("<8sQQQ32s32s")
HEADER_FIELDS = ("magic", "version", "epoch", "pages", "geometry", "model fingerprint")
MIN_PAGES = 2  # page 0 and one that can be used


class PageName(NamedTuple):
    """What a host page holds."""

    digest: bytes  # 32 bytes
    checksums: Checksums  # uint32 [units], CRC32C


class PageNames(NamedTuple):
    """What some host pages hold, in their order."""

    named: npt.NDArray[np.bool_]  # [n]; where it is False the others hold anything
    digests: Bytes  # uint8 [n, 32]
    checksums: Checksums  # uint32 [n, units], CRC32C


class _Segment:
    """Both sides' view of a segment."""

    def __init__(self, info: SegmentInfo, pool: mmap.mmap, names: mmap.mmap) -> None:
        self.path = Path(info.path)
        self.epoch = info.epoch
        self.pages = info.pages
        self.geometry = info.geometry
        self.model_fingerprint = info.model_fingerprint
        self._maps = [pool, names]
        self._pool: Bytes | None = np.frombuffer(pool, np.uint8).reshape(info.pages, info.geometry.page_bytes)
        self._names: NameRows | None = np.frombuffer(names, _row_type(info.geometry))

    @property
    def size(self) -> int:
        """Bytes of the pool."""
        return self.pages * self.geometry.page_bytes

    @property
    def pages_array(self) -> Bytes:
        """uint8 [pages, page_bytes], the shared memory itself. Raises SegmentError once closed."""
        if self._pool is None:
            raise SegmentError(f"segment {self.path.name} is closed; map it again")
        return self._pool

    @property
    def host_pages(self) -> HostPages:
        """The same memory, page by page. Raises SegmentError once closed."""
        return HostPages(self.geometry, self.pages_array, pool=True)

    def name_of(self, page: int) -> PageName | None:
        """The page's name, None when it has none. Raises SegmentError for a page outside 1..pages-1."""
        self._check(np.array([page]))
        row = self._rows()[page]
        state = int(row["state"])
        name = PageName(row["digest"].tobytes(), row["checksums"].copy())
        return name if state & 1 and state == int(row["state"]) else None

    def names_of(self, pages: npt.NDArray[np.integer]) -> "PageNames":
        """The names of pages, at once. Raises SegmentError as `name_of`."""
        self._check(pages)
        rows = self._rows()
        found = rows[pages]
        named = (found["state"] & 1 == 1) & (found["state"] == rows["state"][pages])
        return PageNames(named, found["digest"], found["checksums"])

    def close(self) -> None:
        """Let the memory go: now, or when the last array that somebody made of it is gone."""
        self._pool = self._names = None
        while self._maps:
            with contextlib.suppress(BufferError):  # such an array is alive: the map goes when it does
                self._maps.pop().close()

    def _rows(self) -> NameRows:
        if self._names is None:
            raise SegmentError(f"segment {self.path.name} is closed; map it again")
        return self._names

    def _check(self, pages: npt.NDArray[np.integer]) -> None:
        if pages.size and (pages.min() < 1 or pages.max() >= self.pages):
            raise SegmentError(
                f"pages {pages.min()}..{pages.max()} are outside 1..{self.pages - 1} of {self.path.name}"
            )


class OwnedSegment(_Segment):
    """The storage's side: the only writer of names."""

    def __init__(self, info: SegmentInfo, pool: mmap.mmap, names: mmap.mmap) -> None:
        super().__init__(info, pool, names)
        self._used = np.zeros(info.pages, np.uint64)  # when each page was named or adopted, by a counter
        self._uses = 0

    def info(self, storage_id: str) -> SegmentInfo:
        """What a mapper needs to know; every page but the header's is leased."""
        return _describe(self.path, storage_id, self.epoch, self.pages, self.geometry, self.model_fingerprint)

    def set_names(self, pages: PageIds, digests: bytes, checksums: Checksums) -> None:
        """Name pages: int32 [n], n x 32 bytes, uint32 [n, units]. A reader sees no half-written name.

        `state` is a sequence number, odd while the name is valid, so that a reader also notices a name that was
        taken back and given anew while it was copying.
        """
        self.clear_names(pages)
        rows = self._rows()
        rows["digest"][pages] = np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_BYTES)
        rows["checksums"][pages] = checksums
        rows["state"][pages] += 1
        self.touch(pages)

    def touch(self, pages: PageIds) -> None:
        """Note that named pages are used now."""
        self._uses += 1
        self._used[pages] = self._uses

    def named_in(self, first: int, count: int) -> PageIds:
        """Named pages among `first` .. `first + count - 1`: int32, longest unused first."""
        end = min(first + count, self.pages)
        self._check(np.array([first, end - 1]))
        pages = first + np.flatnonzero(self._rows()["state"][first:end] & 1).astype(np.int32)
        return pages[np.argsort(self._used[pages], kind="stable")]

    def clear_names(self, pages: PageIds) -> None:
        """Take names back; unnamed pages stay so."""
        self._check(pages)
        state = self._rows()["state"]
        state[pages] += state[pages] & 1

    def named_pages(self) -> int:
        """Number of pages that have a name."""
        return int((self._rows()["state"] & 1).sum())

    def unlink(self) -> None:
        """Remove the files. Memory that others map lives on until they unmap it."""
        for path in (self.path, names_path(self.path)):
            path.unlink(missing_ok=True)


class MappedSegment(_Segment):
    """A worker's side. Its lock is held until the memory is really unmapped: see `close`."""


def create_segment(
    folder: Path,
    storage_id: str,
    stack_name: str,
    epoch: int,
    geometry: PageGeometry,
    model_fingerprint: bytes,
    pages: int,
) -> OwnedSegment:
    """Make a segment of `pages` pages, page 0 included. It takes about 0.3 s per GiB.

    Raises CapacityError when it doesn't fit into the folder's file system, SegmentError when it can't be made.
    """
    together = geometry.unit_bytes(0) if geometry.layout == "layer_first" else geometry.page_bytes  # of page 0
    if pages < MIN_PAGES or together < HEADER.size:
        raise CapacityError(
            f"a host pool needs {MIN_PAGES} pages whose first {HEADER.size} bytes lie together, not {pages} with "
            f"{together}: raise cache.host_bytes or cache.page_size"
        )
    path = segment_path(folder, stack_name, storage_id, epoch)
    info = _describe(path, storage_id, epoch, pages, geometry, model_fingerprint)
    pool_bytes, names_bytes = pages * geometry.page_bytes, pages * _row_type(geometry).itemsize
    try:
        room = os.statvfs(folder)
        free = room.f_bavail * room.f_frsize
        if pool_bytes + names_bytes > free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        pool = allocate(path, pool_bytes)
        names = allocate(names_path(path), names_bytes)
    except OSError as error:
        if error.errno == errno.EEXIST:
            raise SegmentError(f"{path} exists already; segments are never opened twice: use a new epoch") from None
        for each in (path, names_path(path)):
            each.unlink(missing_ok=True)
        if error.errno == errno.ENOSPC:
            raise CapacityError(
                f"the host pool needs {pool_bytes + names_bytes} bytes ({pages} pages of {geometry.page_bytes}) and "
                f"{folder} has {free} free: lower cache.host_bytes, or give the folder more memory (docker: shm_size)"
            ) from None
        raise SegmentError(f"can't create the host pool {path}: {error.strerror}; see storage.segment_folder") from None
    pool[: HEADER.size] = _header(info)
    return OwnedSegment(info, pool, names)


def map_segment(info: SegmentInfo, identity: str, epoch: int) -> MappedSegment:
    """Map a storage's segment into this process, known as (identity, epoch) to the storage.

    Raises SegmentError naming what differs when the file isn't the one that `info` describes.
    """
    path = Path(info.path)
    held = lock_path(path, identity, epoch)
    try:
        lock = hold_lock(held)
    except OSError as error:
        raise SegmentError(
            f"can't hold {held}: {error.strerror}; a process maps a segment once, and in the storage.segment_folder "
            "that the storage uses"
        ) from None
    try:
        pool, names = _open_maps(info, path)
    except SegmentError:
        release_lock(held, lock)
        raise
    # Not at exit, when threads may still write: the kernel drops the lock once the process is really gone.
    weakref.finalize(pool, release_lock, held, lock).atexit = False
    return MappedSegment(info, pool, names)


def _open_maps(info: SegmentInfo, path: Path) -> tuple[mmap.mmap, mmap.mmap]:
    try:
        pool = open_map(path, info.pages * info.geometry.page_bytes, writable=True)
        names = open_map(names_path(path), info.pages * _row_type(info.geometry).itemsize, writable=False)
    except OSError as error:
        raise SegmentError(f"can't map the host pool {path}: {error.strerror}; has its storage gone?") from None
    found, wanted = HEADER.unpack_from(pool), HEADER.unpack(_header(info))
    for field, value, want in zip(HEADER_FIELDS, found, wanted, strict=True):
        if value != want:
            raise SegmentError(f"{path.name} isn't the segment that was named: its {field} is {value!r}, not {want!r}")
    return pool, names


def _describe(
    path: Path, storage_id: str, epoch: int, pages: int, geometry: PageGeometry, model_fingerprint: bytes
) -> SegmentInfo:
    return SegmentInfo(storage_id, str(path), epoch, pages, 1, pages - 1, geometry, model_fingerprint)


def _row_type(geometry: PageGeometry) -> np.dtype[np.void]:
    return np.dtype([("state", "<u4"), ("digest", np.uint8, (DIGEST_BYTES,)), ("checksums", "<u4", (geometry.units,))])


def _header(info: SegmentInfo) -> bytes:
    return HEADER.pack(MAGIC, VERSION, info.epoch, info.pages, info.geometry.fingerprint, info.model_fingerprint)
