"""A weight matrix, multiplied in the way that suits the processor.

float32 is the dtype to compare with, so its product is torch's plain one: its logits equal transformers' to 1e-4.
bfloat16 on a CPU with instructions for it goes through oneDNN in a layout made once: a small batch is about twice as
fast as torch's plain product, and a row's result hardly depends on the batch. The two operators are the ones that
torch.compile's weight freezing uses; torch is pinned, and where they don't work the plain product runs. Other CPUs
have `kernels.linear`.
"""

import functools
import logging
from collections.abc import Callable

import torch
import torch.nn.functional as F

from kernels import linear

log = logging.getLogger("kvtide.model")


class Linear:
    """`x @ weight.T + bias`: x [T, in] -> [T, out], in the weight's dtype."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """weight: [out, in], given up to this object, which may keep it in another layout; bias: [out]."""
        self._multiply = _choose(weight, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._multiply(x)


def _choose(weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
    if not _is_half_on_cpu(weight):
        return lambda x: F.linear(x, weight, bias)
    if linear.is_needed():
        return linear.Product(weight, bias)
    if not can_pack():
        return lambda x: F.linear(x, weight, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def _is_half_on_cpu(weight: torch.Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.bfloat16


@functools.cache
def can_pack() -> bool:
    """Do oneDNN's operators work here for bfloat16? Tried once, and right on a small product."""
    weight, x = (torch.linspace(-1, 1, rows * 32).view(rows, 32).bfloat16() for rows in (16, 3))
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        found = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    except (AttributeError, RuntimeError) as error:
        log.info("linear=plain reason=%s", str(error).splitlines()[0])
        return False
    return torch.allclose(found.float(), F.linear(x.float(), weight.float()), rtol=1e-2, atol=1e-2)
