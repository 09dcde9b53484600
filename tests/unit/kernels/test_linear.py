"""Products of bfloat16: C and the pieces equal one in float64 to a rounding, and a row ignores the others."""

import pytest
import torch

from kernels import linear, native
from kernels.linear import Product

SHAPES = [(1, 16, 1), (1, 48, 7), (2, 64, 33), (3, 576, 96), (4, 32, 5), (8, 160, 100), (9, 64, 50), (40, 48, 31)]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "columns", "outputs"), SHAPES)
def test_equals_a_product_in_float64(version: str, rows: int, columns: int, outputs: int, bias: bool) -> None:
    x, weight, added = random(rows, columns), random(outputs, columns), random(outputs) if bias else None
    found = Product(weight, added)(x)
    wanted = x.double() @ weight.double().T + (added.double() if added is not None else 0.0)
    assert (found.dtype, found.shape) == (torch.bfloat16, (rows, outputs))
    torch.testing.assert_close(found.double(), wanted, rtol=2**-8, atol=1e-4 * columns**0.5)


@pytest.mark.parametrize(("rows", "columns", "outputs"), SHAPES)
def test_a_row_depends_on_neither_the_others_nor_the_threads(
    rows: int, columns: int, outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if native.load()[0] is None:
        pytest.skip("no C compiler here")
    x, weight = random(rows, columns), random(outputs, columns)
    together = Product(weight)(x)
    for threads in (1, 2, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=threads: count)
        for row in range(rows):
            assert torch.equal(Product(weight)(x[row : row + 1])[0], together[row])


def test_many_products_in_a_row_are_all_whole() -> None:
    """A thread that comes late to one product must not touch the next."""
    weights = [random(outputs, 32) for outputs in (1, 33, 4096, 64, 31)]
    x = random(1, 32)
    wanted = [(x.double() @ weight.double().T) for weight in weights]
    products = [Product(weight) for weight in weights]
    for turn in range(3000):
        which = turn % len(weights)
        found = products[which](x).double()
        assert torch.allclose(found, wanted[which], rtol=2**-8, atol=1e-3), f"product {turn}"


def test_a_nan_stays_one(version: str) -> None:
    x = torch.ones(1, 16, dtype=torch.bfloat16)
    x[0, 3] = torch.nan
    assert Product(torch.ones(2, 16, dtype=torch.bfloat16))(x).isnan().all()


def test_a_matrix_in_pieces_is_the_matrix(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "PIECE", 200)
    x, weight, bias = random(50, 64), random(31, 64), random(31)
    wanted = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(Product(weight, bias)(x).double(), wanted, rtol=2**-8, atol=1e-2)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"x is \(1, 16\); pass \[rows, 32\]"):
        Product(random(4, 32))(random(1, 16))
    with pytest.raises(ValueError, match=r"\(4, 16\), \(3,\)"):
        Product(random(4, 16), random(3))


def test_other_dtypes_are_refused() -> None:
    """C would take their bytes for bfloat16."""
    with pytest.raises(ValueError, match=r"torch\.float32 on cpu; pass bfloat16"):
        Product(random(4, 16))(random(1, 16).float())
    with pytest.raises(ValueError, match=r"torch\.float32 on cpu; pass bfloat16"):
        Product(random(4, 16).float())
    with pytest.raises(ValueError, match=r"torch\.float16 on cpu; pass bfloat16"):
        Product(random(4, 16), random(4).half())
