"""Runs a class written to SGLang's HiCacheStorage interface as a `KeyValueStore`.

It is called as SGLang's generic page path calls it: `batch_set(keys, values)`, `batch_get(keys, targets)` with flat
uint8 tensors, `batch_exists(keys) -> leading hits`, `exists`, `clear`. The zero-copy methods (v1, v2) aren't used:
they need SGLang's own host pool. These methods block, so they run in threads.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from services.storage.key_value import KeyValueStore, Value

METHODS = ("get", "set", "exists", "batch_get", "batch_set", "batch_exists", "clear")
RENAMED_KEPT = 10_000  # keys that were removed from a store which can't remove; older ones may come back

T = TypeVar("T")


@dataclass
class StorageConfig:
    """What SGLang tells a storage class about its rank: the fields of its HiCacheStorageConfig, of one rank."""

    extra_config: dict[str, Any] = field(default_factory=dict)
    model_name: str = "kvtide"
    is_mla_model: bool = False
    is_page_first_layout: bool = True
    enable_storage_metrics: bool = False
    should_split_heads: bool = False
    tp_lcm_size: int | None = None
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1


class HiCacheStore(KeyValueStore):
    """An instance of such a class, made as SGLang makes a dynamic one: `cls(storage_config, {})`."""

    def __init__(self, cls: Callable[..., Any], options: dict[str, Any], threads: int) -> None:
        self._storage = cls(StorageConfig(extra_config=options), {})
        self._threads = ThreadPoolExecutor(threads, "l3-hicache")
        self._renamed: OrderedDict[str, int] = OrderedDict()  # key: how often it was removed

    async def exists(self, keys: Sequence[str]) -> int:
        return int(await self._in_thread(lambda: self._storage.batch_exists(self._names(keys))))

    async def get(self, keys: Sequence[str], size: int) -> list[Value | None]:
        names = self._names(keys)

        def work() -> list[Value | None]:
            targets = [torch.empty(size, dtype=torch.uint8) for _ in names]
            tensors = self._storage.batch_get(names, targets) or [None] * len(names)
            return [None if each is None else _bytes_of(each) for each in tensors]

        return await self._in_thread(work)

    async def set(self, keys: Sequence[str], values: Sequence[bytearray]) -> list[bool]:
        names = self._names(keys)

        def work() -> list[bool]:
            tensors = [torch.frombuffer(value, dtype=torch.uint8) for value in values]
            if self._storage.batch_set(names, tensors):
                return [True] * len(names)
            return [bool(self._storage.exists(name)) for name in names]  # one False stands for the whole batch

        return await self._in_thread(work)

    async def remove(self, keys: Sequence[str]) -> int:
        """The interface can't remove: a removed key is known by another name from now on."""
        names = self._names(keys)
        there = await self._in_thread(lambda: sum(bool(self._storage.exists(name)) for name in names))
        for key in keys:
            self._renamed[key] = self._renamed.pop(key, 0) + 1
        while len(self._renamed) > RENAMED_KEPT:
            self._renamed.popitem(last=False)
        return there

    async def clear(self) -> None:
        await self._in_thread(self._storage.clear)

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _names(self, keys: Sequence[str]) -> list[str]:
        return [f"{key}.{self._renamed[key]}" if key in self._renamed else key for key in keys]

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.contiguous().view(torch.uint8).flatten().numpy().data
