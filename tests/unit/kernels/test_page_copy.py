"""Page copies: both versions move the same bytes, return their checksums, and refuse what doesn't fit."""

from typing import Any

import google_crc32c
import numpy as np
import pytest
import torch

from kernels import page_copy
from shared.errors import GeometryError
from shared.geometry import PageGeometry, Part

PAGES = 7


class Pools:
    """A device pool and a host pool of random bytes for one geometry."""

    def __init__(self, geometry: PageGeometry, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.geometry, self.rng = geometry, rng
        self.layers = [[self._buffer(part) for part in geometry.parts] for _ in range(geometry.layers)]
        self.host = rng.integers(0, 256, (PAGES, geometry.page_bytes), dtype=np.uint8)

    def _buffer(self, part: Part) -> torch.Tensor:
        dtype = getattr(torch, part.dtype)
        slots = PAGES * self.geometry.page_size
        raw = self.rng.integers(0, 256, slots * part.token_bytes, dtype=np.uint8)
        return torch.from_numpy(raw).view(dtype).view(slots, part.heads, part.head_dim)

    def arguments(self, layer: int, device_pages: list[int], host_pages: list[int]) -> list[Any]:
        offsets = [self.geometry.unit_offset(part, layer) for part in range(len(self.geometry.parts))]
        ids = [np.array(pages, dtype=np.int64) for pages in (device_pages, host_pages)]
        return [self.layers[layer], ids[0], self.host, ids[1], offsets, self.geometry.page_size]

    def device_unit(self, layer: int, part: int, page: int) -> bytes:
        size = self.geometry.page_size
        rows = self.layers[layer][part][page * size : (page + 1) * size]
        return rows.contiguous().view(torch.uint8).numpy().tobytes()

    def host_unit(self, layer: int, part: int, page: int) -> bytes:
        start = self.geometry.unit_offset(part, layer)
        return self.host[page, start : start + self.geometry.unit_bytes(part)].tobytes()


def geometry_of(dtype: str, page_size: int, heads: int, dims: tuple[int, ...]) -> PageGeometry:
    parts = tuple(Part(f"part{i}", heads, dim, dtype) for i, dim in enumerate(dims))
    return PageGeometry(page_size=page_size, layers=3, parts=parts)


GEOMETRIES = [
    geometry_of("float32", 64, 3, (64, 64)),
    geometry_of("bfloat16", 16, 2, (16, 8)),
    geometry_of("float16", 1, 1, (3, 5)),
    geometry_of("uint8", 4, 1, (7,)),
]


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("to_host", [True, False])
def test_every_unit_arrives_and_nothing_else_moves(version: str, geometry: PageGeometry, to_host: bool) -> None:
    pools, before = Pools(geometry), Pools(geometry)
    device_pages, host_pages = [5, 1, 3], [2, 6, 4]
    copy = page_copy.copy_device_to_host if to_host else page_copy.copy_host_to_device
    crc = np.stack([copy(*pools.arguments(i, device_pages, host_pages)) for i in range(geometry.layers)])
    assert crc.shape == (geometry.layers, 3, len(geometry.parts))
    assert crc.dtype == np.uint32
    source = before.device_unit if to_host else before.host_unit
    for layer in range(geometry.layers):
        for part in range(len(geometry.parts)):
            for row, (device_page, host_page) in enumerate(zip(device_pages, host_pages, strict=True)):
                unit = source(layer, part, device_page if to_host else host_page)
                assert pools.device_unit(layer, part, device_page) == unit
                assert pools.host_unit(layer, part, host_page) == unit
                assert crc[layer, row, part] == google_crc32c.value(unit)
            untouched = pools.host_unit if to_host else pools.device_unit
            was = before.host_unit if to_host else before.device_unit
            for page in set(range(PAGES)) - set(host_pages if to_host else device_pages):
                assert untouched(layer, part, page) == was(layer, part, page)


def test_round_trip_over_random_pages(version: str) -> None:
    pools, before = Pools(GEOMETRIES[0], seed=1), Pools(GEOMETRIES[0], seed=1)
    order = pools.rng.permutation(PAGES).tolist()
    out = page_copy.copy_device_to_host(*pools.arguments(1, list(range(PAGES)), order))
    for buffer in pools.layers[1]:
        buffer.zero_()
    back = page_copy.copy_host_to_device(*pools.arguments(1, list(range(PAGES)), order))
    np.testing.assert_array_equal(out, back)
    for buffer, was in zip(pools.layers[1], before.layers[1], strict=True):
        assert torch.equal(buffer.view(torch.int32), was.view(torch.int32))


def test_no_pages_is_fine(version: str) -> None:
    pools = Pools(GEOMETRIES[0])
    assert page_copy.copy_device_to_host(*pools.arguments(0, [], [])).shape == (0, 2)


def test_a_read_only_pool_can_be_read_but_not_written(version: str) -> None:
    pools = Pools(GEOMETRIES[1])
    pools.host.flags.writeable = False
    page_copy.copy_host_to_device(*pools.arguments(0, [1], [2]))
    with pytest.raises(GeometryError, match="read-only"):
        page_copy.copy_device_to_host(*pools.arguments(0, [1], [2]))


def _with(index: int, value: Any) -> list[Any]:
    arguments = Pools(GEOMETRIES[0]).arguments(0, [1, 2], [3, 4])
    arguments[index] = value(arguments[index]) if callable(value) else value
    return arguments


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (_with(1, np.array([1, PAGES])), "device pages 1..7 are outside"),
        (_with(1, np.array([-1, 1])), "device pages -1..1 are outside"),
        (_with(3, np.array([0, PAGES])), "host pages 0..7 are outside"),
        (_with(1, np.array([1])), "1 device pages can't pair with 2"),
        (_with(1, np.array([1, 2], dtype=np.int32)), "int64"),
        (_with(4, [0]), "2 parts, 1 offsets"),
        (_with(4, lambda offsets: [offsets[0], GEOMETRIES[0].page_bytes]), "outside a page"),
        (_with(4, lambda offsets: [-1, offsets[1]]), "outside a page"),
        (_with(5, 48), "whole pages of 48"),
        (_with(2, lambda host: host.reshape(-1)), "uint8"),
        (_with(2, lambda host: host[:, ::2]), "contiguous uint8"),
        (_with(2, lambda host: host.view(np.int8)), "uint8"),
        (_with(0, lambda buffers: [buffers[0], buffers[1].transpose(0, 1)]), "part 1"),
    ],
)
@pytest.mark.parametrize("copy", [page_copy.copy_device_to_host, page_copy.copy_host_to_device])
def test_what_does_not_fit_is_refused(version: str, copy: Any, arguments: list[Any], match: str) -> None:
    with pytest.raises(GeometryError, match=match):
        copy(*arguments)


def test_which_says_what_runs(version: str) -> None:
    assert page_copy.which().startswith("C" if version == "c" else "torch")
