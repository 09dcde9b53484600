"""Traces for tests: conversations that grow turn by turn, and some that share a beginning."""

import json
import random
from pathlib import Path

from kvtide.replay.trace import Trace, read_trace

PAGE = 64


def random_paths(seed: int, requests: int, ids: int = 4, longest: int = 6) -> list[list[int]]:
    """Requests over few ids, so that they share prefixes often."""
    rng = random.Random(seed)
    return [[rng.randrange(ids) for _ in range(rng.randint(1, longest))] for _ in range(requests)]


def write_trace(path: Path, paths: list[list[int]], partial: int = 0) -> Trace:
    """A trace file with blocks of 64 tokens; each last block lacks `partial` tokens."""
    lines = [
        {"timestamp": 100 * at, "input_length": PAGE * len(ids) - partial, "output_length": 1, "block_size": PAGE}
        | {"hash_ids": ids}
        for at, ids in enumerate(paths)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_trace(path)
