"""Seeded runs of the core against simulated peers and faults. The start changes with the date; a failing seed is
replayed by `kvtide simulate --seed N --trace`."""

import argparse
import datetime
import subprocess
import sys
from collections import Counter

import pytest

from kvtide.simulation import command
from kvtide.simulation import shrink as shrinking
from kvtide.simulation.plan import make_plan
from kvtide.simulation.run import Outcome, run_seed
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


def test_a_storage_that_was_paused_has_its_time_to_tell_what_l3_lost() -> None:
    assert not run_seed(3000841).failure  # two schedulers, one storage of each paused when a page was dropped


def test_the_smallest_failing_plan_is_printed_compiled_or_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = make_plan(7)
    outcome = Outcome(7, 3, "a fault", "", Counter())
    monkeypatch.setattr(shrinking, "shrink", lambda seed: (plan, outcome))
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    arguments = parser.parse_args(["simulate", "--seed", "7", "--shrink"])
    assert command.run(arguments) == 1
    assert f"host_pages {plan.host_pages}" in " ".join(capsys.readouterr().out.split())


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
