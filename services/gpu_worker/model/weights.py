"""Reads a model's safetensors, tensor by tensor, in the dtype that it runs in."""

import hashlib
import json
import logging
from pathlib import Path
from types import TracebackType

import torch
from safetensors import SafetensorError, safe_open

from shared.errors import ModelError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LFS_POINTER = b"version https://git-lfs"

log = logging.getLogger("kvtide.model")


def weight_files(folder: Path) -> list[Path]:
    """The folder's weight files: `model.safetensors`, else those that the index names, by name.

    Other safetensors in the folder, such as a second copy of the weights in another format, are left alone.
    Raises ModelError for a missing file, naming it.
    """
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    index = folder / INDEX
    if not index.is_file():
        raise ModelError(
            f"{folder} holds neither {SINGLE} nor {INDEX}; give a Hugging Face model folder with safetensors weights"
        )
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        files = [folder / Path(name).name for name in names]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is not an index of weights ({error!r}); download it again") from error
    for file in files:
        if not file.is_file():
            raise ModelError(f"{file} is missing, {INDEX} names it; download the file again")
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
        """Raises ModelError when a file is missing, cut short or isn't safetensors."""
        self.dtype = dtype
        self._folder = folder
        self._files = [(path, _open(path)) for path in weight_files(folder)]
        self._file_of = {name: (path, file) for path, file in self._files for name in file.keys()}  # noqa: SIM118
        self._unread = set(self._file_of)

    def __enter__(self) -> "Weights":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _, file in self._files:
            file.__exit__(kind, error, trace)
        if self._unread and error is None:
            log.warning("tensors_not_used count=%d first=%s", len(self._unread), min(self._unread))

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def get(self, name: str, *shape: int) -> torch.Tensor:
        """An own copy of one tensor in `dtype`.

        Raises ModelError when it is missing, has another shape, or holds a value that is no number in `dtype`.
        """
        if name not in self:
            raise ModelError(f"{self._folder} has no tensor {name}, config.json asks for it; download the model again")
        path, file = self._file_of[name]
        try:
            tensor = file.get_tensor(name)
        except (SafetensorError, OSError, AttributeError) as error:
            raise ModelError(f"{path}: {name} can't be read ({error}); download the file again") from error
        if tensor.shape != shape:
            raise ModelError(f"{path}: {name} is {list(tensor.shape)}, config.json asks for {list(shape)}")
        if tensor.dtype not in DTYPES.values():
            raise ModelError(f"{path}: {name} is {tensor.dtype}, which is not one of {', '.join(DTYPES)}")
        converted = tensor.to(self.dtype, copy=True)
        self._check_finite(path, name, converted)
        self._unread.discard(name)
        return converted

    def stacked(self, names: list[str], rows: list[int], *columns: int) -> torch.Tensor:
        """Matrices of `rows[i]` x `columns`, or vectors of `rows[i]`, one above the other."""
        parts = [self.get(name, count, *columns) for name, count in zip(names, rows, strict=True)]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    @staticmethod
    def _check_finite(path: Path, name: str, tensor: torch.Tensor) -> None:
        if not torch.stack(tensor.aminmax()).isfinite().all():
            raise ModelError(
                f"{path}: {name} has a value that is no number in {str(tensor.dtype).removeprefix('torch.')}; "
                "set model.dtype to bfloat16 or float32, or download the file again"
            )


def _open(path: Path) -> safe_open:
    try:
        with path.open("rb") as file:
            if file.read(len(LFS_POINTER)) == LFS_POINTER:
                raise ModelError(f"{path} is a Git LFS pointer, not the weights; run `git lfs pull` in its folder")
        return safe_open(path, framework="pt").__enter__()
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{path} is damaged, cut short or not a safetensors file ({error}); download the file again"
        ) from error
