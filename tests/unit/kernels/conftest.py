"""The versions of a kernel: C or not for every test that asks for `version`, and Triton's interpreter."""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType

import pytest
import torch

from kernels import alloc_extend, attention, build, native, page_gather

FRONTS = (alloc_extend, attention, page_gather)
Interpreted = Callable[[], AbstractContextManager[None]]


@pytest.fixture(params=["c", "reference"])
def version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "reference":
        monkeypatch.setattr(native, "load", lambda: (None, "turned off by a test"))
    elif native.load()[0] is None:
        assert build.find_compiler() is None, "a compiler is here: run `python -m kernels.build` before the tests"
        pytest.skip("no C compiler here")
    return request.param


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Interpreted]:
    """In its context the functions in front choose Triton for tensors of the CPU, and its interpreter runs them."""
    pytest.importorskip("triton")
    modules: dict[str, ModuleType] = {}

    def version_of(name: str, _: torch.Tensor) -> ModuleType:
        if name not in modules:  # TRITON_INTERPRET is read when a kernel's module is imported
            sys.modules.pop(f"kernels.{name}_triton", None)
            modules[name] = importlib.import_module(f"kernels.{name}_triton")
        return modules[name]

    @contextmanager
    def interpreting() -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            for front in FRONTS:
                patch.setattr(front, "triton_version", version_of)
            yield

    yield interpreting
    for name in modules:
        sys.modules.pop(f"kernels.{name}_triton", None)
