"""Pages gathered into a buffer lie where each host layout says, in torch and in Triton's interpreter; scattered, they
are what they were."""

from collections.abc import Iterator
from itertools import chain

import numpy as np
import pytest
import torch

from kernels.page_gather import PageGather, Place, staged
from shared.errors import GeometryError

PAGES, LAYERS, PAGE = 6, 3, 4
LAYOUTS = ["layer_first", "page_first", "page_first_direct", "page_head"]
SHAPES = [(torch.bfloat16, 2, 16), (torch.float32, 3, 5), (torch.uint8, 1, 3), (torch.bfloat16, 1, 7)]


@pytest.fixture(params=["torch", "triton"], autouse=True)
def versions(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param == "torch":
        yield
        return
    with request.getfixturevalue("interpreted")():
        yield


def noise(count: int, dtype: torch.dtype, heads: int, dim: int) -> list[torch.Tensor]:
    """Pools of random bytes, NaNs of all kinds included."""
    size = PAGES * PAGE * heads * dim * dtype.itemsize
    return [torch.randint(256, (size,), dtype=torch.uint8).view(dtype).view(-1, heads, dim) for _ in range(count)]


def pools(dtype: torch.dtype, heads: int, dim: int, parts: int = 2) -> list[list[torch.Tensor]]:
    return [noise(parts, dtype, heads, dim) for _ in range(LAYERS)]


def laid_out(layout: str, rows: int, heads: int, head: int, parts: int = 2) -> tuple[list[list[Place]], list[int]]:
    """Places of a layout, and the shape of its buffer: [parts, ...] in bytes. head: bytes of one."""
    size = LAYERS * PAGE * heads * head
    token = heads * head
    row, at_layer, at_head, at_token, shape = {
        "layer_first": (PAGE * token, rows * PAGE * token, head, token, [LAYERS, rows, PAGE, heads, head]),
        "page_first": (size, token, head, LAYERS * token, [rows, PAGE, LAYERS, heads, head]),
        "page_first_direct": (size, PAGE * token, head, token, [rows, LAYERS, PAGE, heads, head]),
        "page_head": (size, head, PAGE * LAYERS * head, LAYERS * head, [rows, heads, PAGE, LAYERS, head]),
    }[layout]
    places = [
        [Place(part * rows * size + layer * at_layer, row, at_head, at_token) for part in range(parts)]
        for layer in range(LAYERS)
    ]
    return places, [parts, *shape]


def plainly(layers: list[list[torch.Tensor]], page: int, layout: str) -> torch.Tensor:
    """A page's bytes: [parts, ...] without the dimension of rows."""
    order = {
        "layer_first": (0, 1, 2, 3, 4),
        "page_first": (0, 2, 1, 3, 4),
        "page_first_direct": (0, 1, 2, 3, 4),
        "page_head": (0, 3, 2, 1, 4),
    }[layout]
    tokens = slice(page * PAGE, (page + 1) * PAGE)
    parts = [torch.stack([layer[part][tokens].view(torch.uint8) for layer in layers]) for part in range(2)]
    return torch.stack(parts).permute(order)


@pytest.mark.parametrize(("dtype", "heads", "dim"), SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_exact_both_ways(layout: str, dtype: torch.dtype, heads: int, dim: int) -> None:
    rows, source, target = 5, pools(dtype, heads, dim), pools(dtype, heads, dim)
    places, shape = laid_out(layout, rows, heads, dim * dtype.itemsize)
    buffer = torch.full((int(np.prod(shape)),), 7, dtype=torch.uint8)
    pages, into = np.array([4, 1, 3]), np.array([2, 4, 0])
    PageGather(source, places, PAGE).gather(pages, buffer, into)
    whole = buffer.view(shape).movedim(2 if layout == "layer_first" else 1, 0)  # rows first
    for page, row in zip(pages, into, strict=True):
        assert torch.equal(whole[row], plainly(source, page, layout))
    assert (whole[[1, 3]] == 7).all()
    before = [[pool.clone() for pool in parts] for parts in target]
    PageGather(target, places, PAGE).scatter(pages + 1, buffer, into)
    for old, new, wanted in zip(chain(*before), chain(*target), chain(*source), strict=True):
        for page in range(PAGES):
            expected = wanted[(page - 1) * PAGE : page * PAGE] if page - 1 in pages else old[page * PAGE :][:PAGE]
            assert torch.equal(new[page * PAGE :][:PAGE].view(torch.uint8), expected.view(torch.uint8))


def test_layer_by_layer_through_one_buffer_and_parts_of_two_shapes() -> None:
    source = [[*noise(1, torch.bfloat16, 2, 8), *noise(1, torch.uint8, 1, 3)] for _ in range(LAYERS)]
    target = [[torch.zeros_like(pool) for pool in parts] for parts in source]
    out, back = (PageGather(each, staged(source, PAGE, one_layer=True), PAGE) for each in (source, target))
    pages = np.array([5, 2])
    buffer = torch.zeros(2 * PAGE * (2 * 8 * 2 + 3), dtype=torch.uint8)
    for layer in range(LAYERS):
        one = slice(layer, layer + 1)
        out.gather(pages, buffer, layers=one)
        second = buffer.view(2, -1)[1]
        assert torch.equal(second[: PAGE * 32], source[layer][0][2 * PAGE : 3 * PAGE].view(torch.uint8).flatten())
        assert torch.equal(second[PAGE * 32 :], source[layer][1][2 * PAGE : 3 * PAGE].flatten())
        back.scatter(pages, buffer, layers=one)
    for parts, copies in zip(source, target, strict=True):
        for pool, copy in zip(parts, copies, strict=True):
            was, now = (each.view(torch.uint8).view(PAGES, -1) for each in (pool, copy))
            assert torch.equal(now[pages], was[pages])
            assert not now[[0, 1, 3, 4]].any()


def test_all_layers_staged_and_a_buffer_that_begins_anywhere() -> None:
    source = pools(torch.float32, 2, 4)
    target = [[torch.zeros_like(pool) for pool in parts] for parts in source]
    buffer = torch.zeros(1 + 2 * LAYERS * 2 * PAGE * 32, dtype=torch.uint8)[1:]
    pages = np.array([3, 0])
    PageGather(source, staged(source, PAGE), PAGE).gather(pages, buffer)
    assert torch.equal(buffer.view(2, LAYERS, 2, PAGE, 2, 16)[1], plainly(source, 0, "layer_first").transpose(0, 1))
    PageGather(target, staged(target, PAGE), PAGE).scatter(pages, buffer)
    for pool, copy in zip(chain(*source), chain(*target), strict=True):
        was, now = (each.view(torch.uint8).view(PAGES, -1) for each in (pool, copy))
        assert torch.equal(now[pages], was[pages])


def test_nothing_to_copy_is_fine() -> None:
    source = pools(torch.float32, 2, 4)
    buffer = torch.zeros(0, dtype=torch.uint8)
    PageGather(source, staged(source, PAGE), PAGE).gather(np.empty(0, np.int64), buffer)


def test_what_does_not_fit_is_refused() -> None:
    source = pools(torch.float32, 2, 4)
    places = staged(source, PAGE)
    gather = PageGather(source, places, PAGE)
    row_bytes = LAYERS * 2 * PAGE * 32
    buffer = torch.zeros(2 * row_bytes, dtype=torch.uint8)
    one, two = np.array([1]), np.array([1, 2])
    for pages, into, rows, message in [
        (two, buffer, one, "2 pages can't pair with 1 rows"),
        (np.array([PAGES]), buffer, None, r"pages 6..6 are outside 0..5"),
        (np.array([-1]), buffer, None, r"pages -1..-1 are outside 0..5"),
        (one, buffer, np.array([2]), r"rows 2..2 are outside 0..1"),
        (two, buffer[:-1], None, r"rows 0..1 are outside 0..0"),
        (one.astype(np.int32), buffer, None, "must be int64"),
        (one, buffer.view(torch.int32), None, "contiguous uint8"),
        (one, buffer[::2], None, "contiguous uint8"),
        (one, buffer.to("meta"), None, "the buffer is on meta"),
    ]:
        for copy in (gather.gather, gather.scatter):
            with pytest.raises(GeometryError, match=message):
                copy(pages, into, rows)
    with pytest.raises(GeometryError, match="must match"):
        PageGather(source, places[:2], PAGE)
    with pytest.raises(GeometryError, match="not contiguous whole pages of 5 slots"):
        PageGather(source, places, 5)
    with pytest.raises(GeometryError, match="differs from layer 0's"):
        PageGather([source[0], [each[:PAGE] for each in source[1]], source[2]], places, PAGE)
    with pytest.raises(GeometryError, match="strides are positive"):
        PageGather(source, [[place._replace(token=0) for place in each] for each in places], PAGE)
