"""Our side: the calls that `Core.handle` makes for a request, on the managers of a core of its own."""

import gc
import statistics
import time

import numpy as np

from kvtide.bench.core.workloads import UNIT, Prompt
from services.scheduler.core.core import Core
from services.scheduler.core.events import PeerKey
from services.scheduler.core.integrity import check_integrity
from services.scheduler.core.pages import PagePool
from services.scheduler.core.request import Request, RequestKey
from services.scheduler.core.settings import CoreSettings
from shared.errors import IntegrityError
from shared.messages.gateway import Namespace, Submit
from shared.messages.worker import Sampling

LONG_MATCHES = 31


class TreeUser:
    """A core with a device pool and no process around it. Explanations are off: the peer has none."""

    def __init__(self, page_size: int, tokens: int) -> None:
        self.core = Core(CoreSettings(page_size=page_size, host_tier=False, explain=False))
        self.core.state.device = PagePool(1, tokens // page_size)
        submit = Submit("bench", b"", 1, [], Sampling(0.0, 1.0, 0, 0.0, 0, 0, 0), Namespace(), 0, 1.0)
        self._request = Request(RequestKey(PeerKey("bench", 1), "bench"), submit, b"", 1, 0.0)

    def serve(self, prompt: Prompt) -> None:
        """Match, lock, evict if short, alloc, insert, unlock."""
        state = self.core.state
        tokens = pack(prompt)
        pages = len(prompt) // state.settings.page_size
        match = state.tree.match_prefix(b"", tokens, pages)
        lock = state.tree.lock(match.end)
        cached = match.device_pages
        new = self.core.device.alloc(pages - cached, self._request)
        if new is None:
            raise IntegrityError(f"a prompt of {pages} pages finds no room in a pool of {state.device.total}")
        path = np.concatenate([*(node.value for node in match.device if node.value is not None), new])
        state.device.free(state.tree.insert(b"", tokens, path, cached).duplicates)
        state.unlock(lock)

    def match(self, prompt: Prompt) -> int:
        """Cached pages of a prompt."""
        pages = len(prompt) // self.core.state.settings.page_size
        return self.core.state.tree.match_prefix(b"", pack(prompt), pages).device_pages


def pack(prompt: Prompt) -> bytes:
    """Tokens as the tree has them: int32."""
    return np.frombuffer(prompt, np.int64).astype(np.int32).tobytes()


def requests(prompts: list[Prompt], page_size: int, tokens: int) -> float:
    """Seconds for all prompts, one after the other."""
    user = TreeUser(page_size, tokens)
    gc.collect()
    gc.disable()
    started = time.perf_counter()
    for prompt in prompts:
        user.serve(prompt)
    seconds = time.perf_counter() - started
    gc.enable()
    check_integrity(user.core)
    return seconds


def evict(prompts: list[Prompt], leaves: int, count: int) -> float:
    """Median seconds to evict 64 tokens of a tree with `leaves` leaves of 64 tokens."""
    user = TreeUser(1, leaves * UNIT)
    for prompt in prompts[:leaves]:
        user.serve(prompt)
    taken = []
    for prompt in prompts[leaves : leaves + count]:
        started = time.perf_counter()
        user.core.device.evict(UNIT)
        taken.append(time.perf_counter() - started)
        user.serve(prompt)
    return statistics.median(taken)


def long_match(prompts: list[Prompt], page_size: int) -> float:
    """Median seconds to match a prompt that is cached as a whole."""
    prompt = prompts[0]
    user = TreeUser(page_size, 2 * len(prompt))
    user.serve(prompt)
    taken = []
    for _ in range(LONG_MATCHES):
        again = prompt[:]
        started = time.perf_counter()
        pages = user.match(again)
        taken.append(time.perf_counter() - started)
        if pages * page_size != len(prompt):
            raise IntegrityError(f"{pages * page_size} of {len(prompt)} tokens matched")
    return statistics.median(taken)
