"""Pages of one call on their way between their files and memory.

Threads share a batch, each with pages of its own. Where the C extension is built a slice of pages is one call without
the interpreter (`kernels/page_files.c`); else pages move one after the other through `plain_files`, to the same end.
"""

import ctypes
import errno
import os
from array import array
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kernels import native
from services.storage import plain_files, test_hooks
from services.storage.direct_io import BLOCK, address
from services.storage.page_file import CorruptPageError, PageFormat
from shared.segments import Checksums

# What became of a page, if it isn't an errno: the list of page_files.c, and one more.
DONE, WAITING, NO_REGULAR_FILE, WRONG_LENGTH, CHECK_FAILED = 0, -1, -2, -3, -4
SKIPPED = -5
GONE, THERE = errno.ENOENT, errno.EEXIST
DAMAGED = frozenset((NO_REGULAR_FILE, WRONG_LENGTH, CHECK_FAILED))
FAILED = frozenset(errno.errorcode) - {GONE}

SLICE_BYTES = 2 * 2**20  # of pages in one call of C: beside them what a call costs is small
TOUCH_AFTER_S = 60  # a hit renews a file's time at most this often: a restart's LRU is right to the minute
CALL_BYTES = 2**30  # the most in one call of the system, which may move less than it is asked for


class Policy(NamedTuple):
    """How pages are read and written."""

    verify: bool = True  # compare a page's bytes with its checksums
    direct: bool = True  # write past the kernel's cache, where that is possible
    fsync: bool = False  # a page that was written survives a power cut


DEFAULT = Policy()


class PageBatch:
    """`outcomes[i]`: what became of page i. Pages that are not WAITING are left alone."""

    def __init__(
        self,
        layout: PageFormat,
        paths: Sequence[str],
        digests: Sequence[bytes],
        pages: Sequence[memoryview],
        policy: Policy,
        checksums: Sequence[Checksums] = (),
        temporaries: Sequence[str] = (),
    ) -> None:
        """pages: page_bytes each, contiguous. checksums and temporaries: of pages that are to be written; the latter
        are names beside `paths` that nobody else uses. Raises ValueError for memory of another size, or that can't be
        written when pages are to be read."""
        for page in pages:
            if page.nbytes != layout.page_bytes or (page.readonly and not checksums):
                kind = "read-only" if page.readonly else "writable"
                raise ValueError(f"{page.nbytes} {kind} bytes for a page of {layout.page_bytes}; pass host pages")
        self.outcomes = array("i", [WAITING] * len(paths))
        self.lengths = array("q", bytes(8 * len(paths)))  # bytes that a written file takes
        self.past_cache = bytearray(len(paths))  # 1: moved with O_DIRECT
        self.replaces = bytearray(len(paths))  # 1: a file that is there is bad and is written over
        self.policy = policy
        self._layout, self._paths, self._digests, self._pages = layout, paths, digests, pages
        self._checksums, self._temporaries = checksums, temporaries
        self._errors: dict[int, Exception] = {}
        self.stopped = False
        self._headers = _blocks(len(paths), layout.header_bytes)
        extension, _ = native.load()
        self._native = extension if extension is not None and extension.page_files else None
        self._sealed = bytearray(len(paths))  # 1: has its header
        if self._native is not None:
            self._in_c, self._kept = self._fill(self._native)

    def __len__(self) -> int:
        return len(self.outcomes)

    def slices(self, threads: int) -> list[tuple[int, int]]:
        """Ranges of pages for `threads` threads to take one after the other."""
        step = max(1, min(SLICE_BYTES // self._layout.page_bytes, -(-len(self) // threads)))
        return [(first, min(first + step, len(self))) for first in range(0, len(self), step)]

    def stop(self) -> None:
        """No further page is begun. From any thread."""
        self.stopped = True
        if self._native is not None:
            self._in_c.stop = 1

    def read(self, first: int, last: int) -> int:
        """Read the pages of a range. Returns the first that it didn't come to, after 1 ms: ask again, or don't."""
        last = self._reached_hook(first, last, test_hooks.before_read)
        if self._native is None:
            self._each(first, first + 1, self._read_plainly)
            return first + 1
        end = self._native.move_pages(self._in_c, first, last, writing=False)
        if self._layout.keyed:
            self._each(first, end, self._check_origin, DONE)
        return end

    def write(self, first: int, last: int) -> int:
        """The same for pages that are to be written."""
        last = self._reached_hook(first, last, test_hooks.before_write)
        if self._native is None:
            self._each(first, first + 1, self._write_plainly)
            return first + 1
        if self._layout.keyed:
            for at in range(first, last):
                self._seal(at)
        end = self._native.move_pages(self._in_c, first, last, writing=True)
        for at in range(first, end):
            if self.outcomes[at] == errno.ENOENT:
                self._write_first(self._native, at)
        return end

    def count(self, outcomes: Collection[int]) -> int:
        """How many pages became one of these."""
        return sum(each in outcomes for each in self.outcomes)

    def checksums(self) -> list[Checksums | None]:
        """uint32 [units] of each page that was read, None for the others."""
        found = self._layout.tables(self._headers)
        return [table if outcome == DONE else None for table, outcome in zip(found, self.outcomes, strict=True)]

    def error(self, at: int) -> Exception:
        """Why a page isn't DONE: OSError or CorruptPageError."""
        if at in self._errors:
            return self._errors[at]
        if (outcome := self.outcomes[at]) > 0:
            return OSError(outcome, os.strerror(outcome), self._paths[at])
        if outcome == NO_REGULAR_FILE:
            return CorruptPageError("it is no regular file")
        if outcome == WRONG_LENGTH:
            return CorruptPageError(f"the file has {self.lengths[at]} bytes instead of {self._layout.file_bytes}")
        try:
            self._check(at)
        except CorruptPageError as error:
            return error
        return CorruptPageError(f"its check failed in C ({outcome}) and not in Python")

    def _fill(self, extension: native.Native) -> tuple[native.PageBatch, list[object]]:
        """The batch as C sees it, and what must live as long."""
        layout, count = self._layout, len(self)
        names, temporaries = _c_strings(self._paths), _c_strings(self._temporaries)
        pages = np.fromiter(map(address, self._pages), np.uint64, count)
        beginnings = layout.beginnings(self._digests)
        units = layout.geometry.units
        if self._checksums:
            crc = np.concatenate(self._checksums).astype(np.uint32).reshape(count, units)
        else:
            crc = np.empty((count, units), np.uint32)
        replaces, past = (np.frombuffer(each, np.uint8) for each in (self.replaces, self.past_cache))
        batch = native.PageBatch(
            names, temporaries, self._headers.ctypes.data, pages.ctypes.data, beginnings.ctypes.data,
            self.outcomes.buffer_info()[0], self.lengths.buffer_info()[0], replaces.ctypes.data, past.ctypes.data,
            layout.units.ctypes.data, crc.ctypes.data, layout.header_bytes, layout.page_bytes, beginnings.shape[1],
            units, CALL_BYTES, TOUCH_AFTER_S, self.policy.verify, self.policy.direct,
            self.policy.fsync, layout.keyed, extension.hardware, 0,
        )  # fmt: skip
        return batch, [names, temporaries, pages, beginnings, crc, replaces, past]

    def _reached_hook(self, first: int, last: int, hook: test_hooks.Hook) -> int:
        """With test hooks a slice is one page, so that each meets its own. Returns the slice's new end."""
        if not test_hooks.active():
            return last
        if self.outcomes[first] == WAITING:
            try:
                hook(Path(self._paths[first]))
            except OSError as error:
                self._fail(first, error)
        return first + 1

    def _each(self, first: int, last: int, work: Callable[[int], None], outcome: int = WAITING) -> None:
        """Do `work` for each page of a range that has this outcome. What has begun is ended in a stopped batch too."""
        for at in range(first, last):
            if self.outcomes[at] == outcome and not (self.stopped and outcome == WAITING):
                try:
                    work(at)
                    self.outcomes[at] = DONE
                except (OSError, CorruptPageError) as error:
                    self._fail(at, error)

    def _fail(self, at: int, error: OSError | CorruptPageError) -> None:
        self._errors[at] = error
        self.outcomes[at] = (error.errno or errno.EIO) if isinstance(error, OSError) else CHECK_FAILED

    def _read_plainly(self, at: int) -> None:
        header = self._headers[at].data
        self.past_cache[at] = plain_files.read(self._paths[at], [header, self._pages[at]], CALL_BYTES, TOUCH_AFTER_S)
        self._check(at)
        self._check_origin(at)

    def _seal(self, at: int) -> None:
        """Make a page's header, once: a slice that took longer than 1 ms comes again, and a proof reads the page."""
        if self.outcomes[at] == WAITING and not self._sealed[at]:
            one = slice(at, at + 1)
            self._layout.fill(self._headers[one], self._digests[one], self._checksums[one], self._pages[one])
            self._sealed[at] = 1

    def _write_plainly(self, at: int) -> None:
        names, buffers = (self._temporaries[at], self._paths[at]), [self._headers[at].data, self._pages[at]]
        if not self.replaces[at] and os.path.lexists(names[1]):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), names[1])
        self._seal(at)
        self.past_cache[at], self.lengths[at] = plain_files.write(
            *names, buffers, CALL_BYTES, direct=self.policy.direct, fsync=self.policy.fsync
        )

    def _write_first(self, extension: native.Native, at: int) -> None:
        """Write a page whose folder wasn't there."""
        try:
            plain_files.make_folder(Path(self._paths[at]).parent, fsync=self.policy.fsync)
        except OSError as error:
            self._fail(at, error)
        else:
            self.outcomes[at] = WAITING
            extension.move_pages(self._in_c, at, at + 1, writing=True)

    def _check(self, at: int) -> None:
        checksums = self._layout.checksums_in(self._headers[at].data, self._digests[at])
        if self.policy.verify:
            self._layout.verify(self._pages[at], checksums)

    def _check_origin(self, at: int) -> None:
        self._layout.check_origin(self._headers[at].data, self._pages[at])


def _c_strings(names: Sequence[str]) -> "ctypes.Array[ctypes.c_char_p]":
    """For C; all at once, which takes a tenth of the time."""
    encoded = os.fsencode("\0".join(names)).split(b"\0") if names else []
    return (ctypes.c_char_p * len(encoded))(*encoded)


def _blocks(count: int, size: int) -> npt.NDArray[np.uint8]:
    """uint8 [count, size] that begins on a block."""
    memory = np.empty(count * size + BLOCK, np.uint8)
    start = -memory.ctypes.data % BLOCK
    return memory[start : start + count * size].reshape(count, size)
