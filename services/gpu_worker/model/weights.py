"""Reads a model's safetensors, tensor by tensor, in the dtype that it runs in."""

import hashlib
from pathlib import Path
from types import TracebackType

import torch
from safetensors import SafetensorError, safe_open

from shared.errors import ModelError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def weight_files(folder: Path) -> list[Path]:
    """The folder's safetensors, by name. Raises ModelError when there is none."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder} holds no *.safetensors; give a Hugging Face model folder with safetensors weights")
    return files


def weights_fingerprint(folder: Path) -> bytes:
    """32 bytes: SHA-256 over name and content of config.json and of every weight file. About a second per 2 GB.

    Raises ModelError when a file is missing or can't be read.
    """
    whole = hashlib.sha256(b"kvtide-weights-1")
    try:
        for path in (folder / "config.json", *weight_files(folder)):
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").digest()
            whole.update(hashlib.sha256(path.name.encode()).digest() + content)
    except OSError as error:
        raise ModelError(f"{error.filename} can't be read ({error.strerror}); check the model folder") from error
    return whole.digest()


class Weights:
    """The tensors of a folder, open for reading: `with Weights(folder, dtype) as weights: ...`."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        """Raises ModelError when a file isn't safetensors."""
        self.dtype = dtype
        self._folder = folder
        self._files = [self._open(path) for path in weight_files(folder)]
        self._file_of = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118 - not a dict

    def __enter__(self) -> "Weights":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files:
            file.__exit__(kind, error, trace)

    def get(self, name: str, *shape: int) -> torch.Tensor:
        """An own copy of one tensor in `dtype`. Raises ModelError when it is missing or has another shape."""
        if name not in self._file_of:
            raise ModelError(f"{self._folder} has no tensor {name}; download the model again")
        tensor = self._file_of[name].get_tensor(name)
        if tensor.shape != shape:
            raise ModelError(f"{self._folder}: {name} is {list(tensor.shape)}, config.json asks for {list(shape)}")
        return tensor.to(self.dtype, copy=True)

    def stacked(self, names: list[str], rows: list[int], columns: int) -> torch.Tensor:
        """Matrices of `rows[i]` x `columns`, one above the other: several projections in one product."""
        return torch.cat([self.get(name, count, columns) for name, count in zip(names, rows, strict=True)])

    @staticmethod
    def _open(path: Path) -> safe_open:
        try:
            return safe_open(path, framework="pt").__enter__()
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is not a safetensors file ({error}); download the model again") from error
