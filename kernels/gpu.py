"""Whether a kernel's Triton version runs: one rule for all kernels that have one."""

import importlib
import importlib.util
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def triton_version(name: str, tensor: "Tensor") -> ModuleType | None:
    """The module `kernels.{name}_triton` for a tensor on a GPU, where Triton is installed; None elsewhere."""
    if tensor.is_cuda and importlib.util.find_spec("triton"):
        return importlib.import_module(f"kernels.{name}_triton")
    return None
