"""What lies between the products of a layer: torch, which is the reference, and for bfloat16 on a CPU one call of C.

torch makes `rms_norm` of bfloat16 out of ten operators there, which takes as long as a product of a decode step.
"""

from typing import TYPE_CHECKING

from kernels import native

if TYPE_CHECKING:
    from torch import Tensor


def rms_norm(x: "Tensor", weight: "Tensor", eps: float) -> "Tensor":
    """`x / sqrt(mean(x**2) + eps) * weight` over the last dimension: x [..., n], weight [n] -> x's shape and dtype."""
    import torch.nn.functional as F

    extension = _extension(x, weight)
    if extension is None or weight.shape != x.shape[-1:] or not weight.is_contiguous():
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    x = x.contiguous()
    y = x.new_empty(x.shape)
    extension.rms_norm(x.data_ptr(), weight.data_ptr(), y.data_ptr(), (x.numel() // len(weight), len(weight)), eps)
    return y


def silu_and_mul(gate_up: "Tensor") -> "Tensor":
    """`silu(gate) * up`: gate_up [rows, 2 * n], gate before up -> [rows, n]."""
    import torch.nn.functional as F

    extension = _extension(gate_up)
    if extension is None:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)
    gate_up = gate_up.contiguous()
    rows, width = gate_up.shape
    y = gate_up.new_empty(rows, width // 2)
    extension.silu_and_mul(gate_up.data_ptr(), y.data_ptr(), (rows, width // 2))
    return y


def rotate(x: "Tensor", cos: "Tensor", sin: "Tensor") -> "Tensor":
    """Rotary embedding: `x * cos + (x, its halves exchanged) * sin`, x [T, heads, dim], cos and sin [T, 1, dim]."""
    import torch

    extension = _extension(x, cos, sin)
    rows, heads, dim = x.shape
    if extension is None or x.stride()[1:] != (dim, 1) or dim % 2 or not (cos.is_contiguous() and sin.is_contiguous()):
        return torch.addcmul(x * cos, x.roll(dim // 2, -1), sin)
    y = x.new_empty(x.shape)
    addresses = cos.data_ptr(), sin.data_ptr(), y.data_ptr()
    extension.rotate(x.data_ptr(), x.stride(0), *addresses, (rows, heads, dim))
    return y


def _extension(*tensors: "Tensor") -> native.Native | None:
    import torch

    suits = all(each.dtype == torch.bfloat16 and each.device.type == "cpu" for each in tensors)
    return native.load()[0] if suits and tensors[0].numel() else None
