"""The module inside the LMCache server: values under keys, on LMCache's own memory and disk tiers.

It follows the server-module interface of LMCache 0.5.6, whose names change between releases: the version is pinned, and
the contract suite runs against it. Requests and answers are msgpack; `METHODS` of `lmcache_store` lists them.
"""

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from lmcache.v1.distributed.api import (
    GroupedObjectKeys,
    MemoryLayoutDesc,
    ObjectKey,
    PrefetchLockMode,
    PrefetchTaskSpec,
)
from lmcache.v1.multiprocess.ext_server_module import server_module_handler

RANK = ObjectKey.ComputeKVRank(1, 0, 1, 0)  # of one process: the model fingerprint in the key says the rest
PREFETCH_S = 10.0  # for a read of the disk tier; clients give up earlier
UNLOCK_S = 1.0  # a value that is being written to disk can't be removed; that takes milliseconds
UNLOCK_POLL_S = 0.01

log = logging.getLogger("kvtide.lmcache")
encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode


class PagesModule:
    """Handlers run in LMCache's worker threads, several at once.

    `clear` begins a new generation of keys, written to `state`: LMCache can't list what its disk tier holds. The old
    generation's files go as LMCache evicts.
    """

    def __init__(self, context: Any, state: str = "") -> None:
        self._context = context
        self._state = Path(state) if state else None
        self._generation = int(self._state.read_text()) if self._state and self._state.exists() else 0

    @property
    def context(self) -> Any:
        """What LMCache's EngineModule asks for."""
        return self._context

    def report_status(self) -> dict[str, Any]:
        """For LMCache's status report."""
        return {"kvtide": {"generation": self._generation}}

    def close(self) -> None:
        """Nothing is held."""

    @server_module_handler("kvtide.info")
    def info(self, payload: bytes) -> bytes:
        """[] -> [persistent, bytes used, bytes of the memory tier]."""
        used, capacity = self._manager.get_l1_usage()
        return encode([bool(self._manager.l2_adapters()), used, capacity])

    @server_module_handler("kvtide.exists")
    def exists(self, payload: bytes) -> bytes:
        """[size, keys] -> number of leading keys. Those on disk are read into memory: a `get` will follow."""
        size, names = decode(payload)
        keys = self._keys(names)
        present = self._present(keys, size)
        return encode(next((hits for hits, key in enumerate(keys) if key not in present), len(keys)))

    @server_module_handler("kvtide.get")
    def get(self, payload: bytes) -> bytes:
        """[size, keys] -> [value or nil]."""
        size, names = decode(payload)
        keys = self._keys(names)
        result, hits = self._prefetch(keys, size, PrefetchLockMode.LOCK)
        locked = [keys[hit] for hit in hits]
        try:
            good, objects = self._manager.unsafe_read(locked, result.l1_owners)
            values = {key: memoryview(each.byte_array).cast("B") for key, each in zip(good, objects, strict=True)}
            return encode([values.get(key) for key in keys])
        finally:
            if locked:
                self._manager.finish_read_prefetched(locked, l1_owners=result.l1_owners)

    @server_module_handler("kvtide.put")
    def put(self, payload: bytes) -> bytes:
        """[[key, value]] -> [stored]. False when there is no room in memory, which LMCache makes in a while."""
        items = decode(payload, type=list[tuple[str, memoryview]])
        keys, sizes = self._keys([name for name, _ in items]), {len(value) for _, value in items}
        done: set[ObjectKey] = set()
        for size in sizes:
            group = {key: value for key, (_, value) in zip(keys, items, strict=True) if len(value) == size}
            done |= self._write(group, size)
            done |= self._present([key for key in group if key not in done], size)
        return encode([key in done for key in keys])

    @server_module_handler("kvtide.remove")
    def remove(self, payload: bytes) -> bytes:
        """[size, keys] -> how many there were."""
        size, names = decode(payload)
        keys = self._keys(names)
        present = self._present(keys, size)
        deadline_s = time.monotonic() + UNLOCK_S
        while self._manager.delete_l1_keys(keys)[1] and time.monotonic() < deadline_s:
            time.sleep(UNLOCK_POLL_S)
        for _, adapter in self._manager.l2_adapters():
            adapter.delete(keys)
        return encode(len(present))

    @server_module_handler("kvtide.clear")
    def clear(self, payload: bytes) -> bytes:
        """[] -> nil."""
        self._generation += 1
        if self._state:
            self._state.write_text(str(self._generation))
        self._manager.clear()
        return encode(None)

    @property
    def _manager(self) -> Any:
        return self._context.storage_manager

    def _keys(self, names: Sequence[str]) -> list[ObjectKey]:
        keys = []
        for name in names:
            model, _, digest = name.partition("-")
            model_name = f"{model}.{self._generation}"
            keys.append(ObjectKey(chunk_hash=bytes.fromhex(digest), model_name=model_name, kv_rank=RANK))
        return keys

    def _write(self, values: dict[ObjectKey, memoryview], size: int) -> set[ObjectKey]:
        objects = self._manager.reserve_write(list(values), _layout(size))
        for key, reserved in objects.items():
            memoryview(reserved.byte_array).cast("B")[:size] = values[key]
        if objects:
            self._manager.finish_write_by_owner(self._manager.prepare_write_completion(objects))
        return set(objects)

    def _present(self, keys: Sequence[ObjectKey], size: int) -> set[ObjectKey]:
        if not keys:
            return set()
        _, hits = self._prefetch(keys, size, PrefetchLockMode.NO_LOCK)
        return {keys[hit] for hit in hits}

    def _prefetch(self, keys: Sequence[ObjectKey], size: int, lock: PrefetchLockMode) -> tuple[Any, list[int]]:
        """Bring values into memory; returns LMCache's result and the positions that are there."""
        group = GroupedObjectKeys(keys=list(keys), object_group_id=0, layout_desc=_layout(size))
        task = self._manager.submit_prefetch_task(
            PrefetchTaskSpec(key_groups=[group], fetching_policy="full", lock_mode=lock)
        )
        if not self._manager.wait_prefetch_status(task, PREFETCH_S):
            raise TimeoutError(f"{len(keys)} values weren't there after {PREFETCH_S} s")
        result = self._manager.query_prefetch_status(task)
        return result, sorted(result.hit_cells[0].get_indices_list())


def build_server_modules(build: Any) -> PagesModule:
    """LMCache calls this; `config` of the server's command line is ours."""
    return PagesModule(build.server_context, **build.config)


def _layout(size: int) -> MemoryLayoutDesc:
    return MemoryLayoutDesc(shapes=[torch.Size([size])], dtypes=[torch.uint8])
