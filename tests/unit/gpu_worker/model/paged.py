"""A model with a pool full of noise, and requests on random pages of it."""

from typing import Any

import numpy as np
import torch

from services.gpu_worker.kv_pool import KVPool
from services.gpu_worker.model.batch import ForwardBatch, Segment
from services.gpu_worker.model.llama import Llama

PAGE, POOL_PAGES = 4, 64
CLOSE = {"atol": 1e-4, "rtol": 0.0}


def random_ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 97, count).tolist()


class Engine:
    """Runs steps of any shape; every request gets its own scattered pages."""

    def __init__(self, model: Llama, seed: int = 0) -> None:
        self.model = model
        self.pool = KVPool(model.config.page_geometry(PAGE, str(model.dtype).removeprefix("torch.")), POOL_PAGES)
        self.generator = torch.Generator().manual_seed(seed)
        for layer in range(model.config.layers):
            for buffer in self.pool.layer_buffers(layer):
                buffer.copy_(torch.randn(buffer.shape, generator=self.generator))
        self.free = (torch.randperm(POOL_PAGES - 1, generator=self.generator) + 1).tolist()

    def pages(self, tokens: int) -> list[int]:
        return [self.free.pop() for _ in range(-(-tokens // PAGE))]

    def step(self, parts: list[tuple[list[int], int, list[int]]], before_layer: Any = None) -> torch.Tensor:
        """(new ids, prefix length, pages) of each request -> logits of every new token."""
        segments, ids, positions, slots = [], [], [], []
        for new, prefix, pages in parts:
            table, at = torch.tensor(pages), torch.arange(prefix, prefix + len(new))
            segments.append(Segment(len(ids), len(new), prefix, table))
            ids += new
            positions.append(at)
            slots.append(table[at // PAGE] * PAGE + at % PAGE)
        rows = torch.arange(len(ids))
        batch = ForwardBatch(torch.tensor(ids), torch.cat(positions), torch.cat(slots), segments, rows)
        return self.model.forward(batch, self.pool, before_layer)

    def cold(self, ids: list[int]) -> torch.Tensor:
        return self.step([(ids, 0, self.pages(len(ids)))])

    def in_steps(self, ids: list[int], borders: list[int]) -> torch.Tensor:
        """One request, cut at `borders`, whose last is its length."""
        pages = self.pages(len(ids))
        starts = [0, *borders[:-1]]
        return torch.cat([self.step([(ids[a:b], a, pages)]) for a, b in zip(starts, borders, strict=True)])
