"""A weight matrix, laid out once for the processor that multiplies it.

On a CPU oneDNN's blocked layout makes a small batch about twice as fast as torch's plain product (float32, 8 rows:
0.41 ms against 0.89 ms for 3072 x 576 on two cores), and a row's result hardly depends on the batch. Its float32 noise
is 1.4 times the plain product's: 1e-4 in the default model's logits, a tenth of what a right token may be off. The two
operators are the ones that torch.compile's weight freezing uses; torch is pinned, and where they don't work (another
torch, no oneDNN, float16 on most processors) the plain product runs.
"""

import functools
import logging

import torch
import torch.nn.functional as F

log = logging.getLogger("kvtide.model")


class Linear:
    """`x @ weight.T`: x [T, in] -> [T, out], in the weight's dtype."""

    def __init__(self, weight: torch.Tensor) -> None:
        """weight: [out, in]; given up to this object, which may keep it in another layout."""
        self._packed = weight.device.type == "cpu" and can_pack(weight.dtype)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self._packed else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed:
            product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, None, "none", [], "")
            return product
        return F.linear(x, self._weight)


@functools.cache
def can_pack(dtype: torch.dtype) -> bool:
    """Do the packed operators work here? Tried once per dtype, and right on a small product."""
    weight, x = (torch.linspace(-1, 1, rows * 32).view(rows, 32).to(dtype) for rows in (16, 3))
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        found = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    except (AttributeError, RuntimeError) as error:
        log.info("linear=plain dtype=%s reason=%s", dtype, str(error).splitlines()[0])
        return False
    return torch.allclose(found.float(), F.linear(x.float(), weight.float()), rtol=1e-2, atol=1e-2)
