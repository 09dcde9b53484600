"""`kvtide bench core --peers FOLDER`: both sides take turns on one core; the best of five rounds counts."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kvtide.bench.core import tiers, trees, workloads
from kvtide.bench.core.peer import Peer, PeerError
from kvtide.bench.core.workloads import Prompt
from kvtide.bench.rows import Row, at_most, compared, plain, report
from kvtide.private_folder import private_folder
from kvtide.progress import console, reporter
from services.scheduler.core.settings import WritePolicy

ROUNDS = 5
POOLS = (2_097_152, 262_144)  # tokens: the first one never evicts
GOALS = {1: 3.0, 16: 5.0, 64: 5.0}  # times the peer's requests, by page size
LEAVES = (1_000, 40_000)
EVICTIONS = 61
MAX_EVICT_US = 40.0
MAX_EVICT_GROWTH = 2.0  # from 1,000 leaves to 40,000
LONG_PROMPT = 131_072  # tokens
LONG_GOAL = 1 / 0.6  # at most 0.6 of the peer's time
MEMORY_TIMEOUT_S = 120.0  # it takes 2 s
PEER = "SGLang 0.5.23, compiled core"
TIERED_PEER = "SGLang 0.5.14, HiRadixCache"
POLICIES: tuple[WritePolicy, ...] = ("write_through", "write_through_selective", "write_back")
TIERS = {"page_size": 64, "device_tokens": 131_072, "host_tokens": 393_216}
TIERED_GOAL = 10.0  # times the peer's requests, where both move the bytes of pages
CHECKED = 200  # prompts whose bytes are compared: the device holds some 25

Say = Callable[[str], None]


def run_core_bench(folder: Path, as_json: bool) -> int:
    """Measure and report; returns the exit status: 1 when a goal was missed."""
    with reporter(console(stderr=as_json)) as progress, private_folder("kvtide-core-") as prompts, _one_core():
        rows = measure(folder.absolute(), prompts, progress.say)
    return report("core", rows, as_json)


def measure(folder: Path, scratch: Path, say: Say) -> list[Row]:
    """All rows; `scratch` takes the prompts, so that both sides get the same."""
    say("making the prompts")
    made = {
        "A": workloads.shared_prefixes(),
        "B": workloads.chats(),
        "leaves": workloads.leaves(max(LEAVES) + EVICTIONS),
        "long": workloads.one_long(LONG_PROMPT),
    }
    for name, prompts in made.items():
        _save(scratch / f"{name}.npz", prompts)
    say(f"starting {PEER}")
    with Peer(folder, "s23", scratch) as peer:
        rows = [*_requests(peer, made, say), *_evictions(peer, made["leaves"], say), _long_match(peer, made["long"])]
    say(f"starting {TIERED_PEER}")
    with Peer(folder, "s14", scratch) as peer:
        rows += _tiered(peer, made, say)
    say("memory of a million tokens")
    return [*rows, _memory()]


def _requests(peer: Peer, made: dict[str, list[Prompt]], say: Say) -> Iterator[Row]:
    for page_size, goal in GOALS.items():
        for name in ("A", "B"):
            for pool in POOLS:
                what = f"workload {name}, page {page_size}, pool of {pool:,} tokens"
                say(what)
                sizes = {"page_size": page_size, "tokens": pool}
                ours, theirs = _best(peer, "requests", name, made[name], sizes)
                count = len(made[name])
                yield compared(what, "requests/s", PEER, [count / ours], [count / theirs], goal)


def _evictions(peer: Peer, prompts: list[Prompt], say: Say) -> Iterator[Row]:
    best: dict[int, float] = {}
    for leaves in LEAVES:
        what = f"evict 64 tokens of {leaves:,} leaves"
        say(what)
        some = prompts[: leaves + EVICTIONS]
        best[leaves], theirs = _best(peer, "evict", "leaves", some, {"leaves": leaves, "count": EVICTIONS})
        yield plain(f"{what}, {PEER}", "us", [1e6 * theirs])
        yield at_most(what, "us", [1e6 * best[leaves]], MAX_EVICT_US)
    growth = best[max(LEAVES)] / best[min(LEAVES)]
    yield at_most("evict: 40,000 leaves over 1,000 leaves", "times", [growth], MAX_EVICT_GROWTH)


def _long_match(peer: Peer, prompts: list[Prompt]) -> Row:
    ours, theirs = _best(peer, "long_match", "long", prompts, {"page_size": 64})
    what = f"match a cached prompt of {LONG_PROMPT:,} tokens, page 64"
    return compared(what, "matches/s", PEER, [1 / ours], [1 / theirs], LONG_GOAL)


def _tiered(peer: Peer, made: dict[str, list[Prompt]], say: Say) -> Iterator[Row]:
    """With the bytes of pages, which has the goal, and the bookkeeping alone."""
    for moves, title in ((True, "whole tiered core, pages copied"), (False, "bookkeeping of it alone, no byte moved")):
        for policy in POLICIES:
            for name in ("A", "B"):
                say(f"{title}, write policy {policy}, workload {name}")
                if moves:
                    _check_bytes(peer, policy, name, made[name])
                ours, theirs = [], []
                for _ in range(ROUNDS):
                    ours.append(tiers.tiered_requests(made[name], policy, moves=moves, **TIERS))
                    theirs.append(tiers.Tiered(*peer.ask("tiered_requests", name, policy=policy, moves=moves, **TIERS)))
                tokens = sum(map(len, made[name]))
                hits = f"{ours[0].hits(tokens)}, the peer's {theirs[0].hits(tokens)}"
                what = f"{title}, write policy {policy}, workload {name} (hits: {hits})"
                rate, peer_rate = (len(made[name]) / min(each.seconds for each in side) for side in (ours, theirs))
                yield compared(what, "requests/s", TIERED_PEER, [rate], [peer_rate], TIERED_GOAL if moves else None)


def _check_bytes(peer: Peer, policy: WritePolicy, name: str, prompts: list[Prompt]) -> None:
    """Before the clock runs: on both sides what comes back from host memory is what was computed."""
    tiers.check_bytes(prompts[:CHECKED], policy, **TIERS)
    if not peer.ask("check_bytes", name, policy=policy, count=CHECKED, **TIERS):
        raise PeerError(f"{TIERED_PEER} loaded nothing within {CHECKED} prompts of workload {name}")


def _memory() -> Row:
    command = [sys.executable, "-m", "kvtide.bench.core.memory"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=MEMORY_TIMEOUT_S)
    taken, allowed = map(int, done.stdout.split())
    what = "RSS of 1,000,000 cached tokens, page 64, leaves of a page (limit: 6 bytes a token + 1 kB a node)"
    return at_most(what, "MB", [taken / 1e6], allowed / 1e6)


def _best(peer: Peer, job: str, name: str, prompts: list[Prompt], arguments: dict[str, Any]) -> tuple[float, float]:
    """The best seconds of both sides, which take turns."""
    ours, theirs = [], []
    for _ in range(ROUNDS):
        ours.append(getattr(trees, job)(prompts, **arguments))
        theirs.append(peer.seconds(job, name, **arguments))
    return min(ours), min(theirs)


def _save(file: Path, prompts: list[Prompt]) -> None:
    lengths = np.array([len(prompt) for prompt in prompts])
    np.savez(file, tokens=np.concatenate([np.frombuffer(prompt, np.int64) for prompt in prompts]), lengths=lengths)


@contextmanager
def _one_core() -> Iterator[None]:
    """This process and its children run on one core meanwhile, where the system can pin."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
