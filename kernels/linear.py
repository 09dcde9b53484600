"""Products with a large bfloat16 matrix on a CPU that has no instructions for bfloat16.

There torch widens each number as it goes, which takes two to four times as long as the arithmetic. Few rows (a decode
step) go through C, which reads the matrix once, at the speed of memory; many rows (a prompt) through a float32 product
with a piece of the matrix after the other, widened. Both sum in float32 and round once.
"""

import functools
from typing import TYPE_CHECKING

from kernels import native

if TYPE_CHECKING:
    from torch import Tensor

FEW_ROWS = 40  # beyond them the float32 product is faster (measured: C takes 12 us a row and million weights)
PIECE = 4 * 2**20  # weights that are widened at once: 16 MiB
LANES = 16  # of linear.c: a row of the matrix is whole vectors


@functools.cache
def is_needed() -> bool:
    """Has this CPU vectors, and none for bfloat16? True where torch can't tell."""
    import torch

    found = [getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")]
    return not any(each is not None and each() for each in found)


class Product:
    """`x @ weight.T + bias`. What never changes is looked at once: a decode step has a hundred of them."""

    def __init__(self, weight: "Tensor", bias: "Tensor | None" = None) -> None:
        """weight [out, in], bias [out], bfloat16 on a CPU. Raises ValueError for others."""
        if weight.ndim != 2 or (bias is not None and bias.shape != weight.shape[:1]):
            shapes = tuple(weight.shape), None if bias is None else tuple(bias.shape)
            raise ValueError(f"weight and bias are {shapes}; pass [out, in] and [out]")
        for each in (weight,) if bias is None else (weight, bias):
            _check_dtype(each)
        self._weight, self._bias = weight.contiguous(), None if bias is None else bias.contiguous()
        self._out, self._in = weight.shape
        self._addresses = self._weight.data_ptr(), 0 if self._bias is None else self._bias.data_ptr()

    def __call__(self, x: "Tensor") -> "Tensor":
        """x [rows, in], bfloat16 -> bfloat16 [rows, out]. Raises ValueError for another shape or dtype."""
        rows, columns = x.shape
        if columns != self._in:
            raise ValueError(f"x is {tuple(x.shape)}; pass [rows, {self._in}]")
        _check_dtype(x)
        extension = native.load()[0] if 0 < rows <= FEW_ROWS and columns % LANES == 0 else None
        return self._by_pieces(x) if extension is None else self._by_c(extension, x.contiguous())

    def _by_c(self, extension: native.Native, x: "Tensor") -> "Tensor":
        import torch

        y = x.new_empty(len(x), self._out)
        shape = len(x), self._in, self._out
        extension.linear(x.data_ptr(), *self._addresses, y.data_ptr(), shape, torch.get_num_threads())
        return y

    def _by_pieces(self, x: "Tensor") -> "Tensor":
        import torch.nn.functional as F

        y, wide, bias = x.new_empty(len(x), self._out), x.float(), self._bias
        rows = max(1, PIECE // self._in)
        for start in range(0, self._out, rows):
            piece = slice(start, start + rows)
            y[:, piece] = F.linear(wide, self._weight[piece].float(), None if bias is None else bias[piece].float())
        return y


def _check_dtype(tensor: "Tensor") -> None:
    """C takes every address for one of bfloat16 in the CPU's memory."""
    import torch

    if tensor.dtype != torch.bfloat16 or tensor.device.type != "cpu":
        raise ValueError(f"a tensor of {tensor.dtype} on {tensor.device}; pass bfloat16 on a CPU")
