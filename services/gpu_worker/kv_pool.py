"""The device pool of a multi-head model (POOL-01): one index is one token in every layer."""

import torch

from services.gpu_worker.model.weights import DTYPES
from shared.errors import CapacityError, GeometryError
from shared.geometry import PageGeometry, Part

ALIGNMENT = 4096  # bytes: a buffer begins like a mapped host page does, which is where page copies are fastest


class KVPool:
    """Per layer and part one buffer `[slots, heads, head_dim]`. Slot = page * page_size + offset; page 0 is padding."""

    def __init__(self, geometry: PageGeometry, pages: int, device: str = "cpu") -> None:
        """pages: page 0 included. Raises GeometryError for a dtype without tensors, CapacityError without memory."""
        self.geometry, self.pages = geometry, pages
        self.page_size = geometry.page_size
        self.slots = pages * geometry.page_size
        if pages < 2:
            raise CapacityError(f"a pool of {pages} pages has none to hand out beside page 0; give it at least 2")
        self._layers = [[self._buffer(part, device) for part in geometry.parts] for _ in range(geometry.layers)]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return self.pages * self.geometry.page_bytes

    def layer_buffers(self, layer: int) -> list[torch.Tensor]:
        """This layer's buffers in the geometry's order of parts (k, v): contiguous [slots, heads, head_dim]."""
        return self._layers[layer]

    def _buffer(self, part: Part, device: str) -> torch.Tensor:
        if part.dtype not in DTYPES:
            raise GeometryError(f"part {part.name} is {part.dtype}; this pool holds {', '.join(DTYPES)}")
        size = self.slots * part.token_bytes
        try:
            raw = torch.zeros(size + ALIGNMENT, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            raise CapacityError(f"no memory for {self.pages} device pages ({error}); ask for fewer") from error
        start = -raw.data_ptr() % ALIGNMENT
        return raw[start : start + size].view(DTYPES[part.dtype]).view(self.slots, part.heads, part.head_dim)
