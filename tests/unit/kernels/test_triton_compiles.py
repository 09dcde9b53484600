"""The Triton kernels compile for NVIDIA GPUs and fit their shared memory; no GPU is needed for that."""

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

SHARED_BYTES = 99 * 1024  # of a block on GPUs of compute capability 8.6 and 8.9, the smallest that serve models
Compiled = list[tuple[str, Any]]  # name, what Triton made of it


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiled]:
    """Instead of being launched, kernels are compiled and listed here."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction, mangle_type

    made: Compiled = []

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in ("num_warps", "num_stages") if name in kwargs}
        values = dict(zip(self.arg_names, args, strict=False)) | kwargs
        constants = {each.name: values[each.name] for each in self.params if each.is_constexpr}
        types = {
            name: "constexpr" if name in constants else mangle_type(value, specialize=False)
            for name, value in values.items()
        }
        source = ASTSource(self, types, constants)
        made.append((self.fn.__name__, triton.compile(source, target=GPUTarget("cuda", 86, 32), options=options)))

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(JITFunction, "run", compile_only)
    yield made
    for each in made:
        assert each[1].metadata.shared <= SHARED_BYTES, each


def fresh(name: str) -> ModuleType:
    """The module as it is without the interpreter."""
    sys.modules.pop(name, None)
    return importlib.import_module(name)


@pytest.mark.parametrize(("dtype", "dim", "group"), [(torch.bfloat16, 128, 4), (torch.float32, 256, 1)])
def test_attention(compiled: Compiled, dtype: torch.dtype, dim: int, group: int) -> None:
    kernels = fresh("kernels.attention_triton")
    pools = [torch.zeros(32, 2, dim, dtype=dtype) for _ in range(2)]
    pages = torch.tensor([1])
    kernels.store(*pools, pages, *(each[:1] for each in pools))
    q = torch.zeros(3, 2 * group, dim, dtype=dtype)
    kernels.extend(q, *pools, pages, 0, 16, 1.0)
    kernels.decode(q[:1], *pools, pages, pages, pages, 16, 16, 1.0)
    assert [name for name, _ in compiled] == ["_store", "_extend", "_decode", "_join"]


def test_alloc_extend(compiled: Compiled) -> None:
    one = torch.tensor([1])
    fresh("kernels.alloc_extend_triton").extend(one, one + 1, one, one, one, one, 16)
    assert [name for name, _ in compiled] == ["_extend"]


@pytest.mark.parametrize("to_buffer", [True, False])
def test_page_gather(compiled: Compiled, to_buffer: bool) -> None:
    layers = [[torch.zeros(32, 8, 128, dtype=torch.bfloat16)]]
    gather = fresh("kernels.page_gather_triton").Gather(layers, [[(0, 32768, 256, 2048)]], 16)
    one = torch.tensor([1]).numpy()
    gather.copy(one, torch.zeros(65536, dtype=torch.uint8), one, slice(None), to_buffer)
    assert [name for name, _ in compiled] == ["_copy"]
