"""A mutant is a change of source text. It is planted in one process's import of the module, never on disk."""

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import NamedTuple

from shared.compiled import VARIABLE

ROOT = Path(__file__).parents[2]
CORE = "services/scheduler/core"
PEERS = "kvtide/simulation"


class Edit(NamedTuple):
    """Text that stands once in a file, and what stands there instead."""

    path: str  # below the root of the repository
    old: str
    new: str


class Mutant(NamedTuple):
    """One planted fault."""

    name: str
    edits: Sequence[Edit]
    start: int = 0  # the first seed that is tried
    test: str = ""  # that finds it, where seeds seldom reach it; "" = seeds do


def planted(path: Path, source: str, edits: Sequence[Edit]) -> str:
    """The source with the edits that are for this file. Raises ValueError where the text isn't there exactly once."""
    for edit in edits:
        if ROOT / edit.path == path:
            if source.count(edit.old) != 1:
                raise ValueError(f"{edit.path} has {source.count(edit.old)} times what the mutant replaces: {edit.old}")
            source = source.replace(edit.old, edit.new)
    return source


class _Loader(SourceFileLoader):
    def __init__(self, name: str, path: str, edits: Sequence[Edit]) -> None:
        super().__init__(name, path)
        self._edits = edits

    def get_code(self, fullname: str) -> CodeType:
        path = Path(self.path)
        return compile(planted(path, path.read_text(encoding="utf-8"), self._edits), self.path, "exec")


class _Finder(MetaPathFinder):
    def __init__(self, edits: Sequence[Edit]) -> None:
        self._edits = edits
        self._paths = {str(ROOT / edit.path) for edit in edits}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin in self._paths:
            spec.loader = _Loader(fullname, str(spec.origin), self._edits)
        return spec


def plant(mutant: Mutant) -> None:
    """Everything that is imported from now on has the fault. For a process of its own."""
    loaded = [name for name in sys.modules if name.startswith(("services.scheduler.core", "kvtide.simulation"))]
    if loaded:
        raise RuntimeError(f"too late to plant a fault: {loaded[0]} is imported")
    os.environ[VARIABLE] = "0"  # compiled modules call each other without looking at what was planted
    sys.meta_path.insert(0, _Finder(mutant.edits))
