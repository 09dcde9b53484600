"""A weight matrix, laid out once for the processor that multiplies it.

On a CPU oneDNN's blocked layout makes a small bfloat16 batch about twice as fast as torch's plain product, and a row's
result hardly depends on the batch. The two operators are the ones that torch.compile's weight freezing uses; torch is
pinned, and where they don't work (another torch, no oneDNN) the plain product runs. float32 is the dtype to compare
with, so it stays plain: its logits equal transformers' to 1e-4, where the blocked layout would add as much noise again.
"""

import functools
import logging

import torch
import torch.nn.functional as F

PACKED = (torch.bfloat16,)

log = logging.getLogger("kvtide.model")


class Linear:
    """`x @ weight.T + bias`: x [T, in] -> [T, out], in the weight's dtype."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """weight: [out, in], given up to this object, which may keep it in another layout; bias: [out]."""
        self._bias = bias
        self._packed = weight.device.type == "cpu" and can_pack(weight.dtype)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self._packed else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed:
            product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return product
        return F.linear(x, self._weight, self._bias)


@functools.cache
def can_pack(dtype: torch.dtype) -> bool:
    """Is the dtype one to pack, and do the operators work here? Tried once, and right on a small product."""
    if dtype not in PACKED:
        return False
    weight, x = (torch.linspace(-1, 1, rows * 32).view(rows, 32).to(dtype) for rows in (16, 3))
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        found = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    except (AttributeError, RuntimeError) as error:
        log.info("linear=plain dtype=%s reason=%s", dtype, str(error).splitlines()[0])
        return False
    return torch.allclose(found.float(), F.linear(x.float(), weight.float()), rtol=1e-2, atol=1e-2)
