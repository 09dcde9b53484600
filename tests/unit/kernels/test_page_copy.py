"""Page copies: both versions move the same bytes, return their checksums, and refuse what doesn't fit."""

import itertools
from typing import Any

import google_crc32c
import numpy as np
import pytest
import torch
from msgspec.structs import replace

from kernels import page_copy
from kernels.page_copy import PageCopier
from shared.errors import GeometryError
from shared.geometry import PageGeometry, Part
from shared.host_layout import HostPages

PAGES = 7
LAYERS = 3
ALL = slice(None)
ORDER = {  # of a part's [layer, token, head, element] in a page
    "page_first_direct": (0, 1, 2, 3),
    "layer_first": (0, 1, 2, 3),
    "page_first": (1, 0, 2, 3),
    "page_head": (2, 1, 0, 3),
}


class Pools:
    """A device pool and a host pool of random bytes for one geometry."""

    def __init__(self, geometry: PageGeometry, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.geometry, self.rng = geometry, rng
        self.layers = [[self._buffer(part) for part in geometry.parts] for _ in range(geometry.layers)]
        memory = rng.integers(0, 256, (PAGES, geometry.page_bytes), dtype=np.uint8)
        self.host = HostPages(geometry, memory, pool=True)

    def _buffer(self, part: Part) -> torch.Tensor:
        dtype = getattr(torch, part.dtype)
        slots = PAGES * self.geometry.page_size
        raw = self.rng.integers(0, 256, slots * part.token_bytes, dtype=np.uint8)
        return torch.from_numpy(raw).view(dtype).view(slots, part.heads, part.head_dim)

    @property
    def copier(self) -> PageCopier:
        return PageCopier(self.layers, self.geometry)

    def copy(self, to_host: bool, layers: slice, device_pages: list[int], host_pages: list[int]) -> Any:
        ids = [np.array(pages, dtype=np.int64) for pages in (device_pages, host_pages)]
        copier = self.copier
        return (copier.to_host if to_host else copier.to_device)(ids[0], self.host, ids[1]).run(layers)

    def device_page(self, page: int) -> list[np.ndarray]:
        """Of each part uint8 [layers, tokens, heads, bytes of a head]."""
        slots = slice(page * self.geometry.page_size, (page + 1) * self.geometry.page_size)
        return [
            np.stack([self.layers[layer][part][slots].view(torch.uint8) for layer in range(LAYERS)])
            for part in range(len(self.geometry.parts))
        ]

    def host_page(self, page: int) -> list[np.ndarray]:
        """The same of a host page, by the layout's definition."""
        order, at, found = ORDER[self.geometry.layout], 0, []
        data = self.host.get(page)
        for part in self.geometry.parts:
            shape = LAYERS, self.geometry.page_size, part.heads, part.token_bytes // part.heads
            size = int(np.prod(shape))
            found.append(
                data[at : at + size].reshape([shape[axis] for axis in order]).transpose(np.argsort(order)).copy()
            )
            at += size
        return found

    def crc(self, pages: list[np.ndarray], layers: slice) -> list[int]:
        """Of each unit, layer by layer."""
        found = []
        for layer, part in itertools.product(range(LAYERS)[layers], range(len(pages))):
            unit = pages[part][layer]
            heads = np.moveaxis(unit, 1, 0) if self.geometry.layout == "page_head" else [unit]
            found += [google_crc32c.value(np.ascontiguousarray(each).tobytes()) for each in heads]
        return found


def geometry_of(dtype: str, page_size: int, heads: int, dims: tuple[int, ...]) -> PageGeometry:
    parts = tuple(Part(f"part{i}", heads, dim, dtype) for i, dim in enumerate(dims))
    return PageGeometry(page_size=page_size, layers=LAYERS, parts=parts)


SHAPES = [
    geometry_of("float32", 64, 3, (64, 64)),
    geometry_of("bfloat16", 16, 2, (16, 8)),
    geometry_of("float16", 1, 1, (3, 5)),
    geometry_of("uint8", 4, 1, (7,)),
]
GEOMETRIES = [replace(shape, layout=layout) for shape in SHAPES for layout in ORDER]


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("to_host", [True, False])
@pytest.mark.parametrize("layers", [ALL, slice(1, 2)], ids=["all layers", "layer 1"])
def test_every_unit_arrives_and_nothing_else_moves(
    version: str, geometry: PageGeometry, to_host: bool, layers: slice
) -> None:
    pools, before = Pools(geometry), Pools(geometry)
    pairs = {5: 2, 1: 6, 3: 4}  # device and host pages
    crc = pools.copy(to_host, layers, list(pairs), list(pairs.values()))
    assert crc.dtype == np.uint32
    for row, (device, host) in enumerate(pairs.items()):
        source = before.device_page(device) if to_host else before.host_page(host)
        assert crc[row].tolist() == pools.crc(source, layers)
    for page in range(PAGES):
        was, moved = before.device_page(page), before.device_page(page)
        if not to_host and page in pairs:
            for part, source in zip(moved, before.host_page(pairs[page]), strict=True):
                part[layers] = source[layers]
        assert_pages_equal(pools.device_page(page), moved if not to_host else was)
        was, moved = before.host_page(page), before.host_page(page)
        if to_host and page in pairs.values():
            device = next(each for each, host in pairs.items() if host == page)
            for part, source in zip(moved, before.device_page(device), strict=True):
                part[layers] = source[layers]
        assert_pages_equal(pools.host_page(page), moved if to_host else was)


def assert_pages_equal(found: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    for part, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(part, other)


@pytest.mark.parametrize("geometry", GEOMETRIES[: len(ORDER)], ids=str)
def test_round_trip_over_random_pages(version: str, geometry: PageGeometry) -> None:
    pools, before = Pools(geometry, seed=1), Pools(geometry, seed=1)
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
    assert crc.shape == (2, 2)
    for page in range(PAGES):
        wanted = before.device_page(page)
        if page in (1, 3):
            for part, source in zip(wanted, before.host_page({1: 6, 3: 4}[page]), strict=True):
                part[1] = source[1]
        assert_pages_equal(pools.device_page(page), wanted)


def test_no_pages_is_fine(version: str) -> None:
    assert Pools(GEOMETRIES[0]).copy(True, slice(0, 1), [], []).shape == (0, 2)


def test_a_read_only_pool_can_be_read_but_not_written(version: str) -> None:
    pools = Pools(GEOMETRIES[1])
    pools.host.memory.flags.writeable = False
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
        copy(pools.copier, _ids(1), HostPages(pools.geometry, change(pools.host.memory), pool=True), _ids(1))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda layers: layers[0].pop(), "the geometry has 3 of 2"),
        (lambda layers: layers.pop(), "the geometry has 3 of 2"),
        (lambda layers: layers[0].__setitem__(1, layers[0][1].transpose(0, 1)), "layer 0 part 1.*not contiguous"),
        (
            lambda layers: layers[1].__setitem__(0, layers[1][0][:65]),
            "layer 1 part 0.*not contiguous whole pages of 64 slots",
        ),
        (
            lambda layers: layers[2].__setitem__(0, layers[2][0].bfloat16()),
            "a slot of .* has 384 bytes and the geometry.s has 768",
        ),
    ],
)
def test_buffers_that_are_not_the_geometrys_are_refused(change: Any, match: str) -> None:
    pools = Pools(GEOMETRIES[0])
    change(pools.layers)
    with pytest.raises(GeometryError, match=match):
        PageCopier(pools.layers, pools.geometry)


def test_which_says_what_runs(version: str) -> None:
    assert page_copy.which().startswith("C" if version == "c" else "torch")
