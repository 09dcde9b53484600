"""storage.backend = "dynamic": a user's class by import path, of one of three kinds."""

import importlib
from typing import Any

from services.storage.backend import Backend
from services.storage.key_value import KeyValueStore
from services.storage.sealed import SealedBackend
from shared.errors import StorageError


def make_dynamic(
    path: str, options: dict[str, Any], timeout_s: float, io_threads: int, *, verify: bool, key: bytes
) -> Backend:
    """The backend of the class `module:Class`.

    A `KeyValueStore` is made with the options as keyword arguments, and so is a `Backend`, which checks its own pages;
    a class with the methods of SGLang's HiCacheStorage gets them as `extra_config`. Raises StorageError naming what
    is wrong with the class.
    """
    cls = load_class(path)
    try:
        if issubclass(cls, Backend):
            return cls(**options)
        if issubclass(cls, KeyValueStore):
            return SealedBackend("dynamic", cls(**options), timeout_s, io_threads, verify=verify, key=key)
        from services.storage.hicache import METHODS, HiCacheStore  # brings torch, which nothing else here needs

        missing = [name for name in METHODS if not callable(getattr(cls, name, None))]
        if missing:
            raise StorageError(
                f"storage.dynamic_class {path} is no KeyValueStore or Backend of kvtide, and as a HiCacheStorage of "
                f"SGLang it lacks {', '.join(missing)}; see docs/backends.md"
            )
        return SealedBackend(
            "dynamic", HiCacheStore(cls, options, io_threads), timeout_s, io_threads, verify=verify, key=key
        )
    except StorageError:
        raise
    except Exception as error:  # a user's constructor may raise whatever it likes
        raise StorageError(f"{path} can't be made with storage.options {options}: {error!r}") from error


def load_class(path: str) -> type[Any]:
    """The class `module:Class`. Raises StorageError."""
    module_name, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), name)
    except ImportError as error:
        raise StorageError(
            f"can't import {module_name!r} of storage.dynamic_class: {error}; its folder must be in PYTHONPATH"
        ) from error
    except AttributeError:
        raise StorageError(f"the module {module_name!r} of storage.dynamic_class has no {name!r}") from None
    if not isinstance(found, type):
        raise StorageError(f"storage.dynamic_class {path} is {found!r}, not a class")
    return found
