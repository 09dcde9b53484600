"""SGLang 0.5.14's HiRadixCache with its HiCacheController: the tiered jobs of `kvtide bench core`.

There is no GPU: a stream does at once what it is told, and a copy between the pools moves nothing.
"""

import contextlib
import gc
import time
import types
from typing import Any

import torch
from sglang.srt.managers import cache_controller
from sglang.srt.mem_cache import hiradix_cache
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InitLoadBackParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host import HostKVCache
from sglang.srt.mem_cache.radix_cache import RadixKey


class _Stream:
    """A stream, and the events on it: nothing is ever pending."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def query(self) -> bool:
        return True

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...


class _HostPool(HostKVCache):
    """Its slots are SGLang's; there are no bytes behind them."""

    def __init__(self, device_pool: Any, ratio: float, size: int, page_size: int, layout: str, **_: Any) -> None:
        super().__init__(device_pool, ratio, size, page_size, layout, pin_memory=False, device="cpu")

    def get_size_per_token(self) -> int:
        return 1

    def init_kv_buffer(self) -> None: ...

    def load_to_device_per_layer(self, *_: Any) -> None: ...

    def backup_from_device_all_layer(self, *_: Any) -> None: ...

    def get_data_page(self, *_: Any) -> None: ...

    def get_dummy_flat_data_page(self) -> None: ...

    def set_from_flat_data_page(self, *_: Any) -> None: ...


cache_controller.device_module = types.SimpleNamespace(
    Event=_Stream, Stream=_Stream, stream=lambda _: contextlib.nullcontext(), current_stream=_Stream
)
hiradix_cache.get_mha_host_pool_cls = lambda _: _HostPool
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)


def make(policy: str, page_size: int, device_tokens: int, host_tokens: int) -> tuple[Any, Any]:
    """A cache of one layer without L3, and its allocator of device slots."""
    pool = MHATokenToKVPool(device_tokens, page_size, torch.float16, 1, 1, 1, "cpu", False)
    slots = PagedTokenToKVPoolAllocator(device_tokens, page_size, torch.float16, "cpu", pool, False)
    params = CacheInitParams(
        disable=False,
        req_to_token_pool=types.SimpleNamespace(device="cpu"),
        token_to_kv_pool_allocator=slots,
        page_size=page_size,
        tp_cache_group=torch.distributed.group.WORLD,
    )
    arguments = types.SimpleNamespace(
        hicache_ratio=host_tokens / device_tokens,
        hicache_size=0,
        hicache_mem_layout="layer_first",
        hicache_io_backend="kernel",
        hicache_write_policy=policy,
        hicache_storage_backend=None,
        hicache_storage_backend_extra_config=None,
        hicache_storage_prefetch_policy="timeout",
        served_model_name=None,
        extra_metric_labels=None,
    )
    return hiradix_cache.HiRadixCache(params, arguments), slots


def serve(cache: Any, slots: Any, prompt: Any) -> tuple[int, int]:
    """One request, in the order of SGLang's scheduler. Returns its device and host hits, tokens."""
    match = cache.match_prefix(MatchPrefixParams(key=RadixKey(prompt)))
    node, prefix = match.last_device_node, match.device_indices
    on_device = len(prefix)
    cache.inc_lock_ref(node)
    if match.host_hit_length:
        loaded, end = cache.init_load_back(
            InitLoadBackParams(best_match_node=match.best_match_node, host_hit_length=match.host_hit_length)
        )
        if len(loaded):
            cache.inc_lock_ref(end)
            cache.dec_lock_ref(node)
            node, prefix = end, torch.cat([prefix, loaded])
            cache.ready_to_load_host_cache()
    need = len(prompt) - len(prefix)
    short = need - slots.available_size()
    if short > 0:
        cache.evict(EvictParams(num_tokens=short))
    new = slots.alloc(need)
    if new is None:
        raise SystemExit(f"a prompt of {len(prompt)} tokens finds no room")
    value = torch.cat([prefix, new])
    inserted = cache.insert(InsertParams(key=RadixKey(prompt), value=value))
    if inserted.prefix_len > len(prefix):
        slots.free(value[len(prefix) : inserted.prefix_len])
    cache.dec_lock_ref(node)
    cache.check_hicache_events()
    return on_device, len(prefix) - on_device


def tiered_requests(
    prompts: list[Any], policy: str, page_size: int, device_tokens: int, host_tokens: int
) -> tuple[float, int, int]:
    """Seconds for all prompts, and the tokens of them that were hits on the device and on the host."""
    cache, slots = make(policy, page_size, device_tokens, host_tokens)
    on_device = on_host = 0
    gc.collect()
    gc.disable()
    started = time.perf_counter()
    for prompt in prompts:
        device, host = serve(cache, slots, prompt)
        on_device += device
        on_host += host
    seconds = time.perf_counter() - started
    gc.enable()
    if slots.available_size() + cache.evictable_size() + cache.protected_size() != device_tokens:
        raise SystemExit("device slots have leaked")
    if not on_host:
        raise SystemExit(f"{policy}: no prompt was found in host memory")
    return seconds, on_device, on_host
