"""Memory of the tree by RSS, in a process of its own: python -m kvtide.bench.core.memory"""

import ctypes
import gc
from pathlib import Path

import psutil

from kvtide.bench.core.trees import TreeUser
from kvtide.bench.core.workloads import leaves

TOKENS = 1_000_000
PAGE = 64


def bytes_over_allowance() -> tuple[int, int]:
    """RSS that a tree of a million tokens takes, and what it may: 6 bytes a token, 1 kB a node."""
    user = TreeUser(PAGE, 2 * TOKENS)
    before = _rss()
    count = TOKENS // PAGE
    for at in range(0, count, 1000):  # few prompts at once, or their end would hide the tree's growth
        for prompt in leaves(min(1000, count - at), first=at):
            user.serve(prompt)
    nodes = sum(1 for _ in user.core.state.tree.nodes())
    return _rss() - before, 6 * TOKENS + 1000 * nodes


def _rss() -> int:
    gc.collect()
    if Path("/proc/self").exists():
        ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss


if __name__ == "__main__":
    print(*bytes_over_allowance())
