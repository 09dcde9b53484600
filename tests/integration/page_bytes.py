"""A test's way to damage pages: in the segment that storage and worker map, and in a page file."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtide.tiers import geometry_of
from shared.config import Config
from shared.packed import pack
from shared.page_hash import DIGEST_BYTES, chain, namespace_seed
from shared.segment_files import names_path, segment_path


class HostPages:
    """The bytes of a running stack's host pool, found by the tokens that they belong to."""

    def __init__(self, config: Config) -> None:
        self._geometry = geometry_of(config)
        pattern = segment_path(Path(config.storage.segment_folder), config.run.name, "storage-0", 0).name[:-1] + "*"
        found = [path for path in Path(config.storage.segment_folder).glob(pattern) if path.name.count(".") == 3]
        assert len(found) == 1, f"one segment is expected, not {found}"
        units = ("checksums", "<u4", (self._geometry.units,))
        row = np.dtype([("state", "<u4"), ("digest", np.uint8, (DIGEST_BYTES,)), units])
        self._names = np.memmap(names_path(found[0]), dtype=row, mode="r")
        pool = np.memmap(found[0], dtype=np.uint8, mode="r+")
        self._pool: npt.NDArray[np.uint8] = pool.reshape(-1, self._geometry.page_bytes)

    def page(self, tokens: list[int], index: int) -> int:
        """The host page that holds page `index` of these tokens' prefix."""
        digest = np.frombuffer(digests(tokens, self._geometry.page_size)[index], np.uint8)
        named = (self._names["state"] & 1 == 1) & (self._names["digest"] == digest).all(axis=1)
        found = np.flatnonzero(named)
        assert len(found) == 1, f"page {index} has the host pages {found}"
        return int(found[0])

    @contextmanager
    def swapped(self, first: int, second: int) -> Iterator[None]:
        """Exchange the bytes of two pages, and exchange them back at the end."""
        self._pool[[first, second]] = self._pool[[second, first]]
        try:
            yield
        finally:
            self._pool[[first, second]] = self._pool[[second, first]]

    @contextmanager
    def flipped(self, page: int) -> Iterator[None]:
        """Change one bit in the middle of a page, and change it back at the end."""
        place = self._geometry.page_bytes // 2
        self._pool[page, place] ^= 1
        try:
            yield
        finally:
            self._pool[page, place] ^= 1


def digests(tokens: list[int], page_size: int) -> list[bytes]:
    """Of the whole pages of these tokens."""
    return list(chain(namespace_seed("", "", ""), pack(tokens), page_size))


def flip_in_file(config: Config, tokens: list[int], index: int) -> None:
    """Change one bit in the page file of page `index` of these tokens."""
    digest = digests(tokens, config.cache.page_size)[index]
    (file,) = config.storage_folder.rglob(f"{digest.hex()}*")
    with file.open("r+b") as data:
        data.seek(-1000, 2)
        byte = data.read(1)[0]
        data.seek(-1000, 2)
        data.write(bytes([byte ^ 1]))
