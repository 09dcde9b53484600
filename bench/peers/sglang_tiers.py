"""SGLang 0.5.14's HiRadixCache with its HiCacheController: the tiered jobs of `kvtide bench core`.

There is no GPU: a stream does at once what it is told. A job says whether copies happen. Where they do, SGLang's MHA
host pool calls its `direct` copy, which its wheel lacks without a GPU: `transfer` stands in for it.
"""

import contextlib
import gc
import hashlib
import time
import types
from typing import Any

import torch
from sglang.srt.managers import cache_controller
from sglang.srt.mem_cache import hiradix_cache, memory_pool_host
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InitLoadBackParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host import HostKVCache
from sglang.srt.mem_cache.radix_cache import RadixKey

LAYERS, HEADS, HEAD_DIM, DTYPE = 2, 1, 8, torch.float16  # as our side's pages


class _Stream:
    """A stream, and the events on it: nothing is ever pending."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def query(self) -> bool:
        return True

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...


class _EmptyHostPool(HostKVCache):
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


class _HostPool(MHATokenToKVPoolHost):
    """SGLang's own, in memory that isn't pinned: there is no GPU to pin it for."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options | {"pin_memory": False, "device": "cpu"})


def transfer(src_layers: list[Any], dst_layers: list[Any], src_indices: Any, dst_indices: Any, page_size: int) -> None:
    """What `transfer_kv_direct` of sgl_kernel is told, done by torch: an indexed copy of each layer's k and v."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


cache_controller.device_module = types.SimpleNamespace(
    Event=_Stream, Stream=_Stream, stream=lambda _: contextlib.nullcontext(), current_stream=_Stream
)
memory_pool_host.transfer_kv_direct = transfer
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)


def make(policy: str, page_size: int, device_tokens: int, host_tokens: int, moves: bool) -> tuple[Any, Any, Any]:
    """A cache without L3, its allocator of device slots, and its device pool. moves: copies happen."""
    shape = (HEADS, HEAD_DIM, LAYERS) if moves else (1, 1, 1)
    hiradix_cache.get_mha_host_pool_cls = lambda _: _HostPool if moves else _EmptyHostPool
    pool = MHATokenToKVPool(device_tokens, page_size, DTYPE, *shape, "cpu", False)
    slots = PagedTokenToKVPoolAllocator(device_tokens, page_size, DTYPE, "cpu", pool, False)
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
        hicache_io_backend="direct" if moves else "kernel",
        hicache_write_policy=policy,
        hicache_storage_backend=None,
        hicache_storage_backend_extra_config=None,
        hicache_storage_prefetch_policy="timeout",
        served_model_name=None,
        extra_metric_labels=None,
    )
    return hiradix_cache.HiRadixCache(params, arguments), slots, pool


def serve(cache: Any, slots: Any, prompt: Any, forward: Any = None) -> tuple[int, int, Any]:
    """One request, in the order of SGLang's scheduler. Returns its device and host hits, tokens, and its slots.

    forward: told the slots and how many tokens of them were cached, before they join the cache.
    """
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
    if forward is not None:
        forward(value, len(prefix))
    inserted = cache.insert(InsertParams(key=RadixKey(prompt), value=value))
    if inserted.prefix_len > len(prefix):
        slots.free(value[len(prefix) : inserted.prefix_len])
    cache.dec_lock_ref(node)
    cache.check_hicache_events()
    return on_device, len(prefix) - on_device, value


def tiered_requests(
    prompts: list[Any], policy: str, page_size: int, device_tokens: int, host_tokens: int, moves: bool = False
) -> tuple[float, int, int]:
    """Seconds for all prompts, and the tokens of them that were hits on the device and on the host."""
    cache, slots, _ = make(policy, page_size, device_tokens, host_tokens, moves)
    on_device = on_host = 0
    gc.collect()
    gc.disable()
    started = time.perf_counter()
    for prompt in prompts:
        device, host, _ = serve(cache, slots, prompt)
        on_device += device
        on_host += host
    seconds = time.perf_counter() - started
    gc.enable()
    if slots.available_size() + cache.evictable_size() + cache.protected_size() != device_tokens:
        raise SystemExit("device slots have leaked")
    if not on_host:
        raise SystemExit(f"{policy}: no prompt was found in host memory")
    return seconds, on_device, on_host


def check_bytes(
    prompts: list[Any], policy: str, count: int, page_size: int, device_tokens: int, host_tokens: int
) -> int:
    """Serve `count` prompts; each page that a prompt finds or computes must have the bytes that follow from its tokens.
    Returns the tokens that were loaded back."""
    cache, slots, pool = make(policy, page_size, device_tokens, host_tokens, True)
    buffers = [*pool.k_buffer, *pool.v_buffer]
    loaded = 0
    for prompt in prompts[:count]:
        pages = [_computed(key, page_size) for key in _keys(prompt, page_size)]

        def forward(value: Any, cached: int, pages: list[Any] = pages) -> None:
            for page in range(cached // page_size, len(pages)):
                for buffer, content in zip(buffers, pages[page], strict=True):
                    buffer[value[page * page_size : (page + 1) * page_size]] = content

        _, host, value = serve(cache, slots, prompt, forward)
        loaded += host
        for at, buffer in enumerate(buffers):
            if not torch.equal(buffer[value], torch.cat([page[at] for page in pages])):
                raise SystemExit(f"{policy}: a page has other bytes than were computed for its tokens")
    return loaded


def _keys(prompt: Any, page_size: int) -> list[bytes]:
    key, keys = b"", []
    for at in range(0, len(prompt), page_size):
        key = hashlib.sha256(key + prompt[at : at + page_size].tobytes()).digest()
        keys.append(key)
    return keys


def _computed(key: bytes, page_size: int) -> Any:
    """What a forward pass would give a page: finite numbers, for each layer's k and then each one's v."""
    generator = torch.Generator().manual_seed(int.from_bytes(key[:7], "little"))
    return torch.rand((2 * LAYERS, page_size, HEADS, HEAD_DIM), generator=generator).to(DTYPE)
