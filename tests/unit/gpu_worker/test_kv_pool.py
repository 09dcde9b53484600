"""Device pools: shapes, alignment, and the table from positions to slots."""

import pytest
import torch

from services.gpu_worker.kv_pool import ALIGNMENT, KVPool
from services.gpu_worker.req_to_token import ReqToToken
from shared.errors import CapacityError, GeometryError
from shared.geometry import PageGeometry, Part


def geometry(dtype: str = "float32") -> PageGeometry:
    return PageGeometry(page_size=4, layers=2, parts=(Part("k", 3, 8, dtype), Part("v", 3, 6, dtype)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_pool_01_buffers(dtype: str) -> None:
    pool = KVPool(geometry(dtype), 5)
    assert (pool.slots, pool.page_size, pool.nbytes) == (20, 4, 5 * geometry(dtype).page_bytes)
    for layer in range(2):
        k, v = pool.layer_buffers(layer)
        assert k.shape == (20, 3, 8)
        assert v.shape == (20, 3, 6)
        for buffer in (k, v):
            assert buffer.dtype == getattr(torch, dtype)
            assert buffer.is_contiguous()
            assert buffer.data_ptr() % ALIGNMENT == 0
            assert not buffer.any()
    pool.layer_buffers(0)[0].fill_(1)
    assert not pool.layer_buffers(0)[1].any()
    assert not pool.layer_buffers(1)[0].any()


def test_pool_refuses_what_it_cannot_hold() -> None:
    with pytest.raises(CapacityError, match="at least 2"):
        KVPool(geometry(), 1)
    with pytest.raises(GeometryError, match="part k is uint8"):
        KVPool(geometry("uint8"), 2)
    with pytest.raises(CapacityError, match="no memory for"):
        KVPool(geometry(), 10**15)


def test_pool_13_rows() -> None:
    table = ReqToToken(max_requests=2, max_context=14, page_size=4)
    assert table.table.shape == (3, 16)
    assert table.table.dtype == torch.int32
    table.write_pages(2, 0, torch.tensor([7, 3]))
    table.write_pages(2, 2, torch.tensor([9, 1]))
    assert table.slots(2, 3, 9).tolist() == [31, 12, 13, 14, 15, 36]
    assert table.slots(2, 3, 9).dtype == torch.int64
    assert [table.page_table(2, n).tolist() for n in (1, 4, 5, 16)] == [[7], [7], [7, 3], [7, 3, 9, 1]]
    table.write_pages(2, 1, torch.tensor([5]))
    assert table.page_table(2, 12).tolist() == [7, 5, 9]
    assert not table.table[:2].any()


@pytest.mark.parametrize("row", [-1, 0, 3])
def test_pool_13_refuses_rows_that_are_not_handed_out(row: int) -> None:
    table = ReqToToken(max_requests=2, max_context=16, page_size=4)
    for call in (lambda: table.write_pages(row, 0, torch.tensor([1])), lambda: table.slots(row, 0, 1)):
        with pytest.raises(CapacityError, match=f"row {row} is outside 1..2"):
            call()


def test_pool_13_refuses_positions_beyond_the_row() -> None:
    table = ReqToToken(max_requests=2, max_context=16, page_size=4)
    with pytest.raises(CapacityError, match="5 pages don't fit in a row of 4"):
        table.write_pages(1, 3, torch.tensor([1, 2]))
    with pytest.raises(CapacityError, match="max_context"):
        table.page_table(1, 17)
