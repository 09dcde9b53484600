"""SGLang 0.5.23's UnifiedRadixCache over its compiled core: the jobs of `kvtide bench core`."""

import gc
import time
from array import array
from typing import Any

import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

NO_SLOTS = torch.empty(0, dtype=torch.int64)


class _NoBuffers:
    """Stands in for the KV pool: the trees only hand out its slots."""

    device = "cpu"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


def make(page_size: int, tokens: int) -> tuple[Any, Any]:
    """A cache and its allocator."""
    pool = _NoBuffers()
    if page_size == 1:
        slots = TokenToKVPoolAllocator(tokens, torch.float16, "cpu", pool, False)
    else:
        slots = PagedTokenToKVPoolAllocator(tokens, page_size, torch.float16, "cpu", pool, False)
    params = CacheInitParams(
        disable=False, req_to_token_pool=pool, token_to_kv_pool_allocator=slots, page_size=page_size
    )
    params.tree_components = (ComponentType.FULL,)
    params.tree_core_backend = "rust"
    cache = UnifiedRadixCache(params)
    if "ust" not in type(cache.tree_core).__name__:
        raise SystemExit(f"SGLang took {type(cache.tree_core).__name__}, not its compiled core")
    return cache, slots


def requests(prompts: list[Any], page_size: int, tokens: int) -> float:
    """Seconds for match, lock, evict if short, alloc, insert, unlock of each prompt."""
    cache, slots = make(page_size, tokens)
    gc.collect()
    gc.disable()
    started = time.perf_counter()
    for prompt in prompts:
        match = cache.match_prefix(MatchPrefixParams(key=RadixKey(prompt)))
        node, cached = match.last_device_node, match.device_prefix_len
        prefix = cache.path_device_indices(node) if cached else NO_SLOTS
        lock = cache.inc_lock_ref(node)
        need = len(prompt) - cached
        short = need - slots.available_size()
        if short > 0:
            cache.evict(EvictParams(num_tokens=short))
        value = torch.cat([prefix, slots.alloc(need)]) if need else prefix
        cache.insert(InsertParams(key=RadixKey(prompt), value=value, prev_prefix_len=cached))
        cache.dec_lock_ref(node, lock.to_dec_params())
    seconds = time.perf_counter() - started
    gc.enable()
    return seconds


def evict(prompts: list[Any], leaves: int, count: int) -> float:
    """Median seconds to evict 64 tokens of a tree with `leaves` leaves of 64 tokens."""
    cache, slots = make(1, leaves * 64)
    for prompt in prompts[:leaves]:
        cache.insert(InsertParams(key=RadixKey(prompt), value=slots.alloc(64)))
    taken = []
    for prompt in prompts[leaves : leaves + count]:
        started = time.perf_counter()
        cache.evict(EvictParams(num_tokens=64))
        taken.append(time.perf_counter() - started)
        cache.insert(InsertParams(key=RadixKey(prompt), value=slots.alloc(64)))
    return sorted(taken)[len(taken) // 2]


def long_match(prompts: list[Any], page_size: int) -> float:
    """Median seconds to match a prompt that is cached as a whole."""
    prompt = prompts[0]
    cache, slots = make(page_size, 2 * len(prompt))
    cache.insert(InsertParams(key=RadixKey(prompt), value=slots.alloc(len(prompt))))
    taken = []
    for _ in range(31):
        again = array("q", prompt)
        started = time.perf_counter()
        match = cache.match_prefix(MatchPrefixParams(key=RadixKey(again)))
        taken.append(time.perf_counter() - started)
        if match.device_prefix_len != len(prompt):
            raise SystemExit(f"{match.device_prefix_len} of {len(prompt)} tokens matched")
    return sorted(taken)[len(taken) // 2]
