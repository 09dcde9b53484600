"""Makes SGLang's cache modules importable without a GPU: an empty torchvision, a tolerant model registry."""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

ABSENT = "torchvision"  # imported on the way, never called


class _Nothing:
    """Any attribute of a module that is only imported."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing()


class _EmptyModule(types.ModuleType):
    __path__: Sequence[str] = ()
    __version__ = "0.28.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing()


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] != ABSENT:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _EmptyModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


def prepare(wheel: str) -> None:
    """Put an unpacked wheel on the path and mend what its imports trip over."""
    sys.path.insert(0, wheel)
    sys.meta_path.append(_Finder())
    from transformers.models.auto import auto_factory, configuration_auto

    for mapping in (configuration_auto._LazyConfigMapping, auto_factory._LazyAutoMapping):
        _tolerate_repeats(mapping)


def _tolerate_repeats(mapping: Any) -> None:
    register = mapping.register
    mapping.register = lambda self, key, value, exist_ok=False: register(self, key, value, exist_ok=True)
