"""The core as machine code: where `python -m kvtide.compile` has compiled exactly these sources, that is imported.

The code lies in a folder whose name is a hash of the sources and of `shared`, whose types they use, so that a changed
source is never answered by old code: it runs as plain Python, twice as slow, until it is compiled again.
KVTIDE_COMPILED=0 asks for plain Python.
"""

import hashlib
import os
import platform
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec, PathFinder
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
BUILD_FOLDER = ROOT / "kernels" / "_build"
PACKAGES = ("services/scheduler/core", "kvtide/simulation")
TYPES = "shared"  # isn't compiled, but the code has its types built in and raises TypeError for others
NOT_COMPILED = {"__init__.py", "command.py"}
VARIABLE = "KVTIDE_COMPILED"
SUFFIX = EXTENSION_SUFFIXES[0]  # names the interpreter and the machine


def sources() -> list[Path]:
    """The modules that are compiled together, relative to the checkout."""
    found = (path for package in PACKAGES for path in (ROOT / package).glob("*.py"))
    return sorted(path.relative_to(ROOT) for path in found if path.name not in NOT_COMPILED)


def compiled_folder() -> Path:
    """Where the code of these sources is for this interpreter and machine, or would be."""
    key = hashlib.sha256(" ".join((SUFFIX, *platform.libc_ver())).encode())
    types = sorted(path.relative_to(ROOT) for path in (ROOT / TYPES).rglob("*.py"))
    for path in sources() + types:
        key.update(path.as_posix().encode() + b"\0" + (ROOT / path).read_bytes() + b"\0")
    return BUILD_FOLDER / f"core-{key.hexdigest()[:16]}"


class CompiledFinder(MetaPathFinder):
    """Finds the modules of one folder of compiled code."""

    def __init__(self, folder: Path) -> None:
        self._files = {
            ".".join(file.relative_to(folder).parts).removesuffix(SUFFIX): file for file in folder.rglob(f"*{SUFFIX}")
        }

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See MetaPathFinder."""
        file = self._files.get(fullname)
        return spec_from_file_location(fullname, file) if file is not None else None


def use_compiled() -> None:
    """Import compiled modules from now on, if there are any for these sources. The packages call it first."""
    if any(isinstance(finder, CompiledFinder) for finder in sys.meta_path) or os.environ.get(VARIABLE) == "0":
        return
    folder = compiled_folder()
    if folder.is_dir():
        sys.meta_path.insert(sys.meta_path.index(PathFinder), CompiledFinder(folder))
