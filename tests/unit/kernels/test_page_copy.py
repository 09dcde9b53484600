"""Page copies: both versions move the same bytes, return their checksums, and refuse what doesn't fit."""

import itertools
from typing import Any

import google_crc32c
import numpy as np
import pytest
import torch

from kernels import page_copy
from kernels.page_copy import PageCopier
from shared.errors import GeometryError
from shared.geometry import PageGeometry, Part

PAGES = 7
LAYERS = 3
ALL = slice(None)


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

    @property
    def offsets(self) -> list[list[int]]:
        geometry = self.geometry
        return [[geometry.unit_offset(part, layer) for part in range(len(geometry.parts))] for layer in range(LAYERS)]

    @property
    def copier(self) -> PageCopier:
        return PageCopier(self.layers, self.offsets, self.geometry.page_size, self.geometry.page_bytes)

    def copy(self, to_host: bool, layers: slice, device_pages: list[int], host_pages: list[int]) -> Any:
        ids = [np.array(pages, dtype=np.int64) for pages in (device_pages, host_pages)]
        copier = self.copier
        return (copier.to_host if to_host else copier.to_device)(ids[0], self.host, ids[1]).run(layers)

    def device_unit(self, layer: int, part: int, page: int) -> bytes:
        size = self.geometry.page_size
        rows = self.layers[layer][part][page * size : (page + 1) * size]
        return rows.contiguous().view(torch.uint8).numpy().tobytes()

    def host_unit(self, layer: int, part: int, page: int) -> bytes:
        start = self.geometry.unit_offset(part, layer)
        return self.host[page, start : start + self.geometry.unit_bytes(part)].tobytes()


def geometry_of(dtype: str, page_size: int, heads: int, dims: tuple[int, ...]) -> PageGeometry:
    parts = tuple(Part(f"part{i}", heads, dim, dtype) for i, dim in enumerate(dims))
    return PageGeometry(page_size=page_size, layers=LAYERS, parts=parts)


GEOMETRIES = [
    geometry_of("float32", 64, 3, (64, 64)),
    geometry_of("bfloat16", 16, 2, (16, 8)),
    geometry_of("float16", 1, 1, (3, 5)),
    geometry_of("uint8", 4, 1, (7,)),
]


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("to_host", [True, False])
@pytest.mark.parametrize("layers", [ALL, slice(1, 2)], ids=["all layers", "layer 1"])
def test_every_unit_arrives_and_nothing_else_moves(
    version: str, geometry: PageGeometry, to_host: bool, layers: slice
) -> None:
    pools, before = Pools(geometry), Pools(geometry)
    pairs = list(zip([5, 1, 3], [2, 6, 4], strict=True))  # device and host pages
    crc = pools.copy(to_host, layers, [5, 1, 3], [2, 6, 4])
    copied = range(LAYERS)[layers]
    assert crc.shape == (3, len(copied), len(geometry.parts))
    assert crc.dtype == np.uint32
    source, target = ("device_unit", "host_unit") if to_host else ("host_unit", "device_unit")
    moved = {}
    for at, layer in enumerate(copied):
        for part in range(len(geometry.parts)):
            for row, pair in enumerate(pairs):
                unit = getattr(before, source)(layer, part, pair[not to_host])
                assert crc[row, at, part] == google_crc32c.value(unit)
                moved[layer, part, pair[to_host]] = unit
    for layer, part, page in itertools.product(range(LAYERS), range(len(geometry.parts)), range(PAGES)):
        was = getattr(before, target)(layer, part, page)
        assert getattr(pools, target)(layer, part, page) == moved.get((layer, part, page), was)
        assert getattr(pools, source)(layer, part, page) == getattr(before, source)(layer, part, page)


def test_round_trip_over_random_pages(version: str) -> None:
    pools, before = Pools(GEOMETRIES[0], seed=1), Pools(GEOMETRIES[0], seed=1)
    order = pools.rng.permutation(PAGES).tolist()
    out = pools.copy(True, ALL, list(range(PAGES)), order)
    for buffer in itertools.chain(*pools.layers):
        buffer.zero_()
    back = [pools.copy(False, slice(layer, layer + 1), list(range(PAGES)), order) for layer in range(LAYERS)]
    np.testing.assert_array_equal(out, np.concatenate(back, axis=1))
    for buffer, was in zip(itertools.chain(*pools.layers), itertools.chain(*before.layers), strict=True):
        assert torch.equal(buffer.view(torch.int32), was.view(torch.int32))


def test_part_of_the_pages_moves_alone(version: str) -> None:
    pools, before = Pools(GEOMETRIES[0]), Pools(GEOMETRIES[0])
    copy = pools.copier.to_device(_ids(5, 1, 3), pools.host, _ids(2, 6, 4))
    crc = copy.run(slice(1, 2), slice(1, 3))
    assert crc.shape == (2, 1, 2)
    for layer, part, page in itertools.product(range(LAYERS), range(2), range(PAGES)):
        source = before.host_unit(layer, part, {1: 6, 3: 4}[page]) if layer == 1 and page in (1, 3) else None
        assert pools.device_unit(layer, part, page) == (source or before.device_unit(layer, part, page))


def test_no_pages_is_fine(version: str) -> None:
    assert Pools(GEOMETRIES[0]).copy(True, slice(0, 1), [], []).shape == (0, 1, 2)


def test_a_read_only_pool_can_be_read_but_not_written(version: str) -> None:
    pools = Pools(GEOMETRIES[1])
    pools.host.flags.writeable = False
    pools.copy(False, ALL, [1], [2])
    with pytest.raises(GeometryError, match="read-only"):
        pools.copy(True, ALL, [1], [2])


def _ids(*pages: int) -> Any:
    return np.array(pages, dtype=np.int64)


@pytest.mark.parametrize(
    ("device_pages", "host_pages", "match"),
    [
        (_ids(1, PAGES), _ids(3, 4), "device pages 1..7 are outside"),
        (_ids(-1, 1), _ids(3, 4), "device pages -1..1 are outside"),
        (_ids(1, 2), _ids(0, PAGES), "host pages 0..7 are outside"),
        (_ids(1), _ids(3, 4), "1 device pages can't pair with 2"),
        (_ids(1, 2).astype(np.int32), _ids(3, 4), "int64"),
    ],
)
@pytest.mark.parametrize("copy", [PageCopier.to_host, PageCopier.to_device])
def test_pages_that_do_not_exist_are_refused(
    version: str, copy: Any, device_pages: Any, host_pages: Any, match: str
) -> None:
    pools = Pools(GEOMETRIES[0])
    with pytest.raises(GeometryError, match=match):
        copy(pools.copier, device_pages, pools.host, host_pages)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda host: host.reshape(-1), "uint8"),
        (lambda host: host[:, ::2], "contiguous uint8"),
        (lambda host: host.view(np.int8), "uint8"),
        (lambda host: host.reshape(PAGES * 2, -1), "uint8"),
    ],
)
@pytest.mark.parametrize("copy", [PageCopier.to_host, PageCopier.to_device])
def test_a_host_pool_of_another_shape_is_refused(version: str, copy: Any, change: Any, match: str) -> None:
    pools = Pools(GEOMETRIES[0])
    with pytest.raises(GeometryError, match=match):
        copy(pools.copier, _ids(1), change(pools.host), _ids(1))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda pools, offsets: offsets[0].pop(), "must match"),
        (lambda pools, offsets: offsets.pop(), "must match"),
        (lambda pools, offsets: offsets[2].__setitem__(1, pools.geometry.page_bytes), "layer 2 part 1.*outside a page"),
        (lambda pools, offsets: offsets[1].__setitem__(0, -1), "layer 1 part 0.*outside a page"),
        (lambda pools, offsets: pools.layers[0].__setitem__(1, pools.layers[0][1].transpose(0, 1)), "part 1"),
        (lambda pools, offsets: pools.layers[1].__setitem__(1, pools.layers[1][1][:64]), "differs from layer 0's"),
    ],
)
def test_buffers_and_offsets_that_do_not_fit_are_refused(change: Any, match: str) -> None:
    pools = Pools(GEOMETRIES[0])
    offsets = pools.offsets
    change(pools, offsets)
    with pytest.raises(GeometryError, match=match):
        PageCopier(pools.layers, offsets, pools.geometry.page_size, pools.geometry.page_bytes)


def test_a_page_size_that_cuts_the_pool_is_refused() -> None:
    pools = Pools(GEOMETRIES[0])
    with pytest.raises(GeometryError, match="whole pages of 48"):
        PageCopier(pools.layers, pools.offsets, 48, pools.geometry.page_bytes)


def test_which_says_what_runs(version: str) -> None:
    assert page_copy.which().startswith("C" if version == "c" else "torch")
