"""Runs SGLang's side of `kvtide bench storage --peers`: sglang_files.py WHEEL FOLDER

Its HiCacheFile keeps pages in FOLDER/hicache. A job is a line of JSON on stdin, [function, "", {arguments}]: `set` or
`get` of `count` pages of `size` bytes under keys of `turn`; the answer is a line with its seconds.
"""

import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import sglang_imports


class Files:
    """One HiCacheFile, and pages in memory for it."""

    def __init__(self, folder: Path) -> None:
        os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(folder)
        from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

        self._store = HiCacheFile(HiCacheStorageConfig(0, 1, 0, 1, 0, 1, False, False, True, "m"))
        self._pages: dict[tuple[int, int], list[Any]] = {}

    def set(self, turn: int, count: int, size: int) -> float:
        """Seconds."""
        pages, keys = self._of(count, size), _keys(turn, count, size)
        begun = time.perf_counter()
        done = self._store.batch_set(keys, pages)
        seconds = time.perf_counter() - begun
        if not done:
            raise SystemExit("a set failed")
        return seconds

    def get(self, turn: int, count: int, size: int) -> float:
        """Seconds."""
        pages, keys = self._of(count, size), _keys(turn, count, size)
        begun = time.perf_counter()
        found = self._store.batch_get(keys, pages)
        seconds = time.perf_counter() - begun
        if any(each is None for each in found):
            raise SystemExit("a get failed")
        return seconds

    def _of(self, count: int, size: int) -> list[Any]:
        import torch

        if (count, size) not in self._pages:
            self._pages[count, size] = [torch.randint(0, 256, (size,), dtype=torch.uint8) for _ in range(count)]
        return self._pages[count, size]


def _keys(turn: int, count: int, size: int) -> list[str]:
    return [f"{size:x}-{turn}-{at:032x}" for at in range(count)]


def main() -> None:
    """Answer jobs until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the imports print is no answer
    warnings.filterwarnings("ignore")
    wheel, folder = sys.argv[1:]
    sglang_imports.prepare(wheel)
    files = Files(Path(folder) / "hicache")
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        function, _, arguments = json.loads(line)
        print(json.dumps(getattr(files, function)(**arguments)), file=answers, flush=True)


main()
