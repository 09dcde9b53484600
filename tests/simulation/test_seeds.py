"""Seeded runs of the core against simulated peers and faults. The start changes with the date; a failing seed is
replayed by `kvtide simulate --seed N --trace`."""

import datetime
import subprocess
import sys

import pytest

from kvtide.simulation.run import run_seed
from shared.compiled import VARIABLE

SEEDS = 300
CHUNK = 15  # seeds in one test: far below its deadline, even on a busy machine
START = datetime.date.today().toordinal() * 1000


@pytest.mark.slow
@pytest.mark.parametrize("start", range(START, START + SEEDS, CHUNK))
def test_seeds_end_right_with_nothing_left_behind(start: int) -> None:
    print(f"seeds {start}..{start + CHUNK - 1}")
    for seed in range(start, start + CHUNK):
        outcome = run_seed(seed)
        assert not outcome.failure, f"seed {seed}: {outcome.failure}\n{outcome.where}"


def test_seeds_replay_exactly_in_processes_with_different_hash_seeds_compiled_and_plain() -> None:
    script = """
import hashlib
from kvtide.simulation.run import run_seed
from shared.compiled import VARIABLE
for seed in range(54, 80):
    trace = []
    events = run_seed(seed, trace.append).events
    assert run_seed(seed).events == events
    print(len(trace), hashlib.sha256("".join(trace).encode()).hexdigest())
"""
    traces = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": seed, VARIABLE: compiled},
            capture_output=True,
            check=True,
            timeout=100,
        ).stdout
        for seed, compiled in (("1", "1"), ("2", "0"))
    }
    assert len(traces) == 1
    lengths = [int(line.split()[0]) for line in traces.pop().splitlines()]
    assert sum(lengths) > 10_000
