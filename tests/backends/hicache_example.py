"""A storage class as SGLang's users write them: blocking, a file for each key, no checks, no removal."""

from pathlib import Path
from typing import Any

import torch


class FolderStorage:
    """HiCacheStorage's methods, and nothing else of SGLang."""

    def __init__(self, storage_config: Any, kwargs: dict[str, Any]) -> None:
        self.folder = Path(storage_config.extra_config["folder"])
        self.folder.mkdir(parents=True, exist_ok=True)
        self.suffix = f"_{storage_config.model_name}_{storage_config.tp_rank}_{storage_config.tp_size}.bin"

    def path(self, key: str) -> Path:
        return self.folder / f"{key}{self.suffix}"

    def get(self, key: str, target_location: torch.Tensor, target_sizes: Any = None) -> torch.Tensor | None:
        try:
            with self.path(key).open("rb", buffering=0) as file:
                whole = file.readinto(memoryview(target_location.numpy())) == target_location.numel()  # type: ignore[attr-defined]
        except FileNotFoundError:
            return None
        return target_location if whole else None

    def batch_get(
        self, keys: list[str], target_locations: list[torch.Tensor], target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        return [self.get(*each) for each in zip(keys, target_locations, strict=True)]

    def set(self, key: str, value: torch.Tensor, target_location: Any = None, target_sizes: Any = None) -> bool:
        if not self.exists(key):
            value.contiguous().view(dtype=torch.uint8).numpy().tofile(self.path(key))
        return True

    def batch_set(
        self, keys: list[str], values: list[torch.Tensor], target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        return all(self.set(*each) for each in zip(keys, values, strict=True))

    def exists(self, key: str) -> bool:
        return self.path(key).exists()

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return next((hits for hits, key in enumerate(keys) if not self.exists(key)), len(keys))

    def clear(self) -> None:
        for path in self.folder.iterdir():
            path.unlink()
