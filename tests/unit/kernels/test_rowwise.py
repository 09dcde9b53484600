"""Norm and gate: C equals torch's operators to a rounding; other dtypes are torch's."""

import pytest
import torch
import torch.nn.functional as F

from kernels.rowwise import rms_norm, rotate, silu_and_mul

EPS = 1e-5


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (3 * torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 576), (3, 7), (5, 4, 64), (2, 16), (0, 16)])
def test_rms_norm_equals_torchs(version: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = random(*shape, dtype=dtype), random(shape[-1], dtype=dtype)
    found = rms_norm(x, weight, EPS)
    wanted = F.rms_norm(x.double(), shape[-1:], weight.double(), EPS)
    assert (found.dtype, found.shape) == (dtype, x.shape)
    torch.testing.assert_close(found.double(), wanted, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)


def test_rms_norm_of_rows_that_lie_apart(version: str) -> None:
    x, weight = random(4, 3, 32), random(32)
    torch.testing.assert_close(rms_norm(x[:, 1], weight, EPS), rms_norm(x[:, 1].contiguous(), weight, EPS))


def test_rms_norm_of_a_weight_that_lies_apart(version: str) -> None:
    x, weight = random(2, 32), random(64)[::2]
    torch.testing.assert_close(rms_norm(x, weight, EPS), rms_norm(x, weight.contiguous(), EPS), rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1536), (3, 7), (2, 16), (0, 16)])
def test_silu_and_mul_equals_torchs(version: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    rows, size = shape
    gate_up = random(rows, 2 * size, dtype=dtype)
    gate, up = gate_up.double().chunk(2, -1)
    found = silu_and_mul(gate_up)
    assert (found.dtype, found.shape) == (dtype, shape)
    torch.testing.assert_close(
        found.double(), F.silu(gate) * up, rtol=2**-6 if dtype == torch.bfloat16 else 1e-5, atol=1e-5
    )


def test_silu_and_mul_of_rows_that_lie_apart(version: str) -> None:
    gate_up = random(1, 64)[:, ::2]  # so short that a copy's memory is overwritten as soon as it is given back
    torch.testing.assert_close(silu_and_mul(gate_up), silu_and_mul(gate_up.contiguous()), rtol=0, atol=0)


@pytest.mark.parametrize("value", [-3e38, -1e30, -200.0, -90.0, 90.0, 200.0, 1e30, float("inf"), float("nan")])
def test_silu_of_what_is_far_out(version: str, value: float) -> None:
    found = silu_and_mul(torch.tensor([[value, 1.0]]).bfloat16()).double()
    wanted = F.silu(torch.tensor([[value]]).bfloat16().double())
    torch.testing.assert_close(found, wanted, rtol=2**-7, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "heads", "dim"), [(1, 12, 64), (3, 2, 6), (5, 4, 32), (0, 2, 8)])
def test_rotate_equals_the_definition(version: str, rows: int, heads: int, dim: int, dtype: torch.dtype) -> None:
    x = random(rows, heads + 2, dim, dtype=dtype)[:, :heads]  # a part of what one product gives
    angles = torch.randn(rows, 1, dim // 2, generator=torch.Generator().manual_seed(dim)).double()
    cos, sin = angles.cos(), angles.sin()
    left, right = x.double().chunk(2, -1)
    wanted = torch.cat([left * cos - right * sin, right * cos + left * sin], -1)
    found = rotate(x, torch.cat([cos, cos], -1).to(dtype), torch.cat([-sin, sin], -1).to(dtype))
    assert (found.dtype, found.shape) == (dtype, x.shape)
    torch.testing.assert_close(found.double(), wanted, rtol=2**-6, atol=0.1 if dtype == torch.bfloat16 else 1e-5)
