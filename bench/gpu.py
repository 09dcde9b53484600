"""What a machine with a GPU can do: `python -m bench.gpu [--json] [--device cuda:1]`, from the checkout.

Each Triton kernel is compared with the torch reference on the CPU; then bytes a second of pages gathered into a
staging buffer and scattered from it, in each host layout, and of copies between device and pinned host memory. Exit
status 1 when a kernel is wrong, 2 without a GPU or without Triton.
"""

import argparse
import importlib.util
import math
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from kernels.alloc_extend import alloc_extend
from kernels.attention import DecodeAttention, extend_attention, store_kv
from kernels.page_gather import PageGather, Place, staged
from kvtide.bench.rows import Row, at_most, compared, report
from services.gpu_worker.cuda_streams import cuda_device
from services.gpu_worker.pinned import Pinned
from services.gpu_worker.streams import Stream, open_stream
from shared.errors import ConfigError

TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}  # largest difference of an element
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
LAYERS, PAGES, PAGE, KV_HEADS, DIM = 32, 512, 64, 8, 128  # of a model of 8 billion parameters: 8 MiB a page
COPIED = 64  # pages of one copy: 512 MiB, beyond a GPU's cache
ROUNDS, WARM = 10, 3
WAIT_S = 60.0  # for a copy that takes some 30 ms


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="a line of JSON on stdout, the table on stderr")
    parser.add_argument("--device", default="cuda", help="cuda or cuda:N")
    options = parser.parse_args(arguments)
    try:
        device = cuda_device(options.device)
    except ConfigError as error:
        print(f"bench gpu: {error}", file=sys.stderr)
        return 2
    if importlib.util.find_spec("triton") is None:
        print("bench gpu: triton is not installed, and without it torch would be compared with itself", file=sys.stderr)
        return 2
    with torch.cuda.device(device):
        rows = [*checks(device), *gathers(device), *pinned_copies(device)]
    return report("gpu", rows, options.json)


def checks(device: torch.device, longest: int = 2000) -> Iterator[Row]:
    """Each Triton kernel beside torch on the CPU, on random shapes of up to `longest` tokens of prefix."""
    rng = np.random.default_rng(1)
    for dtype, tolerance in TOLERANCES.items():
        extends, decodes, stored = [], [], []
        for dim, kv_heads, group, page_size in [(128, 8, 4, 64), (64, 2, 7, 16), (80, 4, 1, 1), (48, 1, 3, 4)]:
            extend, decode, store = _attention(rng, longest, device, dtype, dim, kv_heads, group, page_size)
            extends.append(extend)
            decodes.append(decode)
            stored.append(store)
        name = str(dtype).removeprefix("torch.")
        yield at_most(f"store_kv differs from torch by, {name}", "", [max(stored)], 0.0)
        yield at_most(f"attention of prompts differs from torch by, {name}", "", [max(extends)], tolerance)
        yield at_most(f"attention of decodes differs from torch by, {name}", "", [max(decodes)], tolerance)
    yield at_most("alloc_extend: slots that differ from torch's", "", [_alloc_extend(rng, device)], 0.0)
    for layout in LAYOUTS:
        yield at_most(f"page gather, {layout}: bytes that differ from torch's", "", [_gather(rng, device, layout)], 0.0)


def _attention(
    rng: np.random.Generator,
    longest: int,
    device: torch.device,
    dtype: torch.dtype,
    dim: int,
    kv_heads: int,
    group: int,
    page: int,
) -> tuple[float, float, float]:
    """The largest differences of a prompt, of decodes and of stored K/V."""
    prefix, tokens, slots = int(rng.integers(0, longest)), int(rng.integers(2, 3 + longest // 8)), 4096
    pools = [torch.randn(slots, kv_heads, dim).to(dtype) for _ in range(2)]
    on_gpu = [pool.to(device, copy=True) for pool in pools]
    new = [torch.randn(tokens, kv_heads, dim).to(dtype) for _ in range(2)]
    table = torch.from_numpy(rng.permutation(slots // page)[: -(-(prefix + tokens) // page)])
    positions = torch.arange(prefix, prefix + tokens)
    new_slots = table[positions // page] * page + positions % page
    store_kv(*pools, new_slots, *new)
    store_kv(*on_gpu, new_slots.to(device), *(each.to(device) for each in new))
    stored = max(map(_difference, on_gpu, pools))
    q, scale = torch.randn(max(3, tokens), kv_heads * group, dim).to(dtype), dim**-0.5
    extend = _difference(
        extend_attention(q[:tokens].to(device), *on_gpu, table.to(device), prefix, page, scale),
        extend_attention(q[:tokens], *pools, table, prefix, page, scale),
    )
    lens = [1, prefix + 1, prefix + tokens]
    decode = _difference(
        DecodeAttention([table.to(device)] * 3, lens, page, scale)(q[:3].to(device), *on_gpu),
        DecodeAttention([table] * 3, lens, page, scale)(q[:3], *pools),
    )
    return extend, decode, stored


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    largest = float((found.cpu().double() - expected.double()).abs().max())
    return math.inf if math.isnan(largest) else largest


def _alloc_extend(rng: np.random.Generator, device: torch.device) -> float:
    prefix = torch.from_numpy(rng.integers(0, 200, 33))
    seq, page = prefix + torch.from_numpy(rng.integers(0, 1000, 33)), 16
    pages = torch.from_numpy(rng.permutation(20_000))
    last, free = pages[:33] * page + (prefix - 1) % page, pages[33:]
    found = alloc_extend(prefix.to(device), seq.to(device), last.to(device), free.to(device), page)
    return float((found.cpu() != alloc_extend(prefix, seq, last, free, page)).sum())


def _gather(rng: np.random.Generator, device: torch.device, layout: str) -> float:
    layers = [[torch.randint(256, (32 * 16, 3, 40), dtype=torch.uint8) for _ in range(2)] for _ in range(3)]
    places = places_of(layout, rows=16, layers=3, page_size=16, heads=3, head=40)
    on_gpu = [[pool.to(device, copy=True) for pool in parts] for parts in layers]
    pages, rows = rng.permutation(32)[:10], rng.permutation(16)[:10]
    buffers = [torch.zeros(16 * 2 * 3 * 16 * 120, dtype=torch.uint8, device=where) for where in ("cpu", device)]
    for pools, buffer in zip((layers, on_gpu), buffers, strict=True):
        copies = PageGather(pools, places, 16)
        copies.gather(pages, buffer, rows)
        copies.scatter((pages + 1) % 32, buffer, rows)
    wrong = int((buffers[1].cpu() != buffers[0]).sum())
    for parts, others in zip(on_gpu, layers, strict=True):
        wrong += sum(int((pool.cpu() != other).sum()) for pool, other in zip(parts, others, strict=True))
    return float(wrong)


def places_of(layout: str, rows: int, layers: int, page_size: int, heads: int, head: int) -> list[list[Place]]:
    """Where k and v of each layer lie in a buffer of `rows` pages, part after part. head: bytes of one."""
    token, size = heads * head, layers * page_size * heads * head
    row, at_layer, at_head, at_token = {
        "layer_first": (page_size * token, rows * page_size * token, head, token),
        "page_first": (size, token, head, layers * token),
        "page_first_direct": (size, page_size * token, head, token),
        "page_head": (size, head, page_size * layers * head, layers * head),
    }[layout]
    return [
        [Place(part * rows * size + layer * at_layer, row, at_head, at_token) for part in range(2)]
        for layer in range(layers)
    ]


def gathers(device: torch.device) -> Iterator[Row]:
    """Pages of all layers into a staging buffer and back, beside a plain copy of as many bytes."""
    pools = [
        [torch.zeros(PAGES * PAGE, KV_HEADS, DIM, dtype=torch.bfloat16, device=device) for _ in range(2)]
        for _ in range(LAYERS)
    ]
    size = COPIED * LAYERS * 2 * PAGE * KV_HEADS * DIM * 2
    buffer, other = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    pages = np.random.default_rng(2).permutation(PAGES)[:COPIED]
    what, peer = f"{COPIED} pages of {size // COPIED >> 20} MiB, bfloat16", "a plain copy on the device"
    for layout in LAYOUTS:
        copies = PageGather(pools, places_of(layout, COPIED, LAYERS, PAGE, KV_HEADS, DIM * 2), PAGE)
        for name, copy in (("gather", copies.gather), ("scatter", copies.scatter)):
            rates, plain = _rates(size, partial(copy, pages, buffer), partial(other.copy_, buffer))
            yield compared(f"{name}, {layout}, all layers, {what}", "GB/s", peer, rates, plain, None)
    copies = PageGather(pools, staged(pools, PAGE, one_layer=True), PAGE)
    part = buffer[: size // LAYERS]
    one = partial(copies.scatter, pages, part, layers=slice(0, 1))
    rates, plain = _rates(len(part), one, partial(other[: len(part)].copy_, part))
    yield compared(f"scatter, one layer of {what}", "GB/s", peer, rates, plain, None)


def pinned_copies(device: torch.device) -> Iterator[Row]:
    """Copies through a stream of the worker, from and to host memory pinned as a mapped segment is."""
    size = 256 << 20
    on_gpu, pageable = torch.zeros(size, dtype=torch.uint8, device=device), torch.zeros(size, dtype=torch.uint8)
    stream, memory = open_stream("bench", str(device)), Pinned(np.zeros(size, np.uint8))
    try:
        for name, pinned, plainly in (
            ("device to pinned host memory", (memory.tensor, on_gpu), partial(pageable.copy_, on_gpu)),
            ("pinned host memory to device", (on_gpu, memory.tensor), partial(on_gpu.copy_, pageable)),
        ):
            rates, plain = _rates(size, partial(_through, stream, *pinned), plainly)
            yield compared(f"{name}, {size >> 20} MiB", "GB/s", "pageable memory", rates, plain, None)
    finally:
        if stream.close(WAIT_S):
            memory.close()


def _through(stream: Stream, into: torch.Tensor, source: torch.Tensor) -> None:
    def copy() -> None:
        into.copy_(source, non_blocking=True)

    stream.submit(copy).wait(WAIT_S)


def _rates(size: int, *copies: Callable[[], object]) -> list[list[float]]:
    """GB/s of `size` bytes by each of the copies, round beside round, until the GPU has done it."""
    found: list[list[float]] = [[] for _ in copies]
    for at in range(WARM + ROUNDS):
        for rates, copy in zip(found, copies, strict=True):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            copy()
            torch.cuda.synchronize()
            if at >= WARM:
                rates.append(size / (time.perf_counter() - begun) / 1e9)
    return found


if __name__ == "__main__":
    sys.exit(main())
