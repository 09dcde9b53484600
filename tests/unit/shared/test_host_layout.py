"""HOST-01: where the bytes of a page lie."""

from typing import get_args

import numpy as np
import pytest

from shared.geometry import HostLayout, PageGeometry, Part
from shared.host_layout import HostPages, units_of

LAYOUTS = get_args(HostLayout)
SHAPES = [
    (Part("k", 2, 8, "float32"), Part("v", 1, 4, "bfloat16")),
    (Part("latent", 1, 24, "bfloat16"),),  # MLA
    (Part("latent", 1, 24, "bfloat16"), Part("index_k", 1, 7, "uint8")),
]


def geometry_of(parts: tuple[Part, ...], layout: HostLayout) -> PageGeometry:
    return PageGeometry(4, 3, parts, layout=layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("parts", SHAPES)
def test_host_01_units_tile_a_page_and_the_device_without_gap_or_overlap(
    parts: tuple[Part, ...], layout: HostLayout
) -> None:
    geometry = geometry_of(parts, layout)
    units = units_of(geometry)
    assert len(units) == geometry.units
    page = np.zeros(geometry.page_bytes, np.int64)
    device = {
        (layer, part): np.zeros(geometry.unit_bytes(part), int) for layer in range(3) for part in range(len(parts))
    }
    for unit in units:
        for run in range(unit.runs):
            page[unit.start + run * unit.stride :][: unit.run_bytes] += 1
            device[unit.layer, unit.part][unit.device_start + run * unit.device_stride :][: unit.run_bytes] += 1
    assert (page == 1).all()
    assert all((each == 1).all() for each in device.values())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("parts", SHAPES)
def test_host_01_a_page_comes_out_as_it_went_in_and_others_stay(parts: tuple[Part, ...], layout: HostLayout) -> None:
    geometry, rng = geometry_of(parts, layout), np.random.default_rng(0)
    host = HostPages(geometry, rng.integers(0, 256, (5, geometry.page_bytes), dtype=np.uint8), pool=True)
    before = [host.get(page).copy() for page in range(5)]
    data = rng.integers(0, 256, geometry.page_bytes, dtype=np.uint8)
    host.put(3, data)
    for page in range(5):
        np.testing.assert_array_equal(host.get(page), data if page == 3 else before[page])


def test_host_01_layer_first_lays_a_layer_of_all_pages_side_by_side() -> None:
    geometry = geometry_of(SHAPES[0], "layer_first")
    host = HostPages(geometry, np.zeros((5, geometry.page_bytes), np.uint8), pool=True)
    at = 0
    for unit in units_of(geometry):
        assert host.place(unit) == (at, unit.run_bytes)
        at += 5 * unit.run_bytes
    assert at == host.memory.size


def test_host_01_a_page_of_layer_first_travels_as_page_first_direct() -> None:
    one, other = (geometry_of(SHAPES[0], layout) for layout in ("layer_first", "page_first_direct"))
    assert units_of(one) == units_of(other)
    travelling = HostPages(one, np.zeros((1, one.page_bytes), np.uint8), pool=False)
    assert travelling.get(0).base is not None  # the memory itself
    assert travelling.place(units_of(one)[1]) == (units_of(one)[1].start, one.page_bytes)
