"""`kvtide simulate`: many seeds, or one with its trace."""

import argparse
import gc
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtide.simulation.run import Outcome

DEFAULT_SEEDS = 300
SHOWN_FAILURES = 20  # failing seeds printed in full
ENOUGH_SEEDS = 2000  # from so many on, everything in `reached.REQUIRED` must have happened


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add `simulate` to the command line."""
    text = "run the scheduler's core against simulated peers and faults"
    parser: argparse.ArgumentParser = subparsers.add_parser("simulate", help=text, description=text + ".")
    parser.add_argument("--seeds", type=int, default=DEFAULT_SEEDS, metavar="N", help="number of seeds (%(default)s)")
    parser.add_argument("--start", type=int, default=0, metavar="S", help="the first of them (%(default)s)")
    parser.add_argument("--seed", type=int, metavar="S", help="run this seed alone")
    parser.add_argument("--trace", action="store_true", help="print every event and command (with --seed)")
    parser.add_argument(
        "--shrink", action="store_true", help="take out of a failing run what it doesn't need (with --seed)"
    )
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.set_defaults(without_loop=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the seeds; 0 when none fails and, among many, nothing that matters was missed."""
    if args.seed is not None:
        log = print if args.trace else None
        return _shrink(args.seed, log) if args.shrink else _run_one(args.seed, log)
    result = _run_many(args.start, args.seeds)
    missed = _missed(result["reached"]) if args.seeds >= ENOUGH_SEEDS else []
    result["not_reached"] = missed
    if args.json:
        print(json.dumps(result), flush=True)
    else:
        _print(result)
    return 1 if result["failures"] or missed else 0


def _run_many(start: int, seeds: int) -> dict[str, Any]:
    from kvtide.simulation.run import run_seed

    gc.freeze()  # what was imported stays: the collector needn't look at it time and again
    started, started_cpu = time.monotonic(), time.process_time()
    events, seen = 0, Counter[str]()
    failures: list[Outcome] = []
    for seed in range(start, start + seeds):
        outcome = run_seed(seed)
        events += outcome.events
        seen.update(outcome.seen)
        if outcome.failure:
            failures.append(outcome)
            if len(failures) <= SHOWN_FAILURES:
                print(f"seed {seed}: {outcome.failure}\n  replay: kvtide simulate --seed {seed} --trace", flush=True)
    return {
        "seeds": seeds,
        "failures": len(failures),
        "seeds_per_s": round(seeds / (time.process_time() - started_cpu), 1),  # of one core's time
        "seconds": round(time.monotonic() - started, 1),
        "events_per_seed": round(events / max(1, seeds)),
        "start": start,
        "failed_seeds": [outcome.seed for outcome in failures[:SHOWN_FAILURES]],
        "reached": dict(sorted(seen.items())),
    }


def _missed(reached: dict[str, int]) -> list[str]:
    from kvtide.simulation.reached import REQUIRED

    return [name for name in REQUIRED if not reached.get(name)]


def _print(result: dict[str, Any]) -> None:
    for name, count in result["reached"].items():
        print(f"  {name:36} {count}")
    for name in result["not_reached"]:
        print(f"  {name:36} never reached")
    print(" ".join(f"{name}={value}" for name, value in result.items() if name not in ("reached", "not_reached")))


def _run_one(seed: int, log: Callable[[str], None] | None) -> int:
    from kvtide.simulation.run import run_seed

    outcome = run_seed(seed, log)
    if outcome.failure:
        print(f"seed {seed} failed after {outcome.events} events\n{outcome.where}")
        return 1
    print(f"seed {seed}: {outcome.events} events, no failure")
    return 0


def _shrink(seed: int, log: Callable[[str], None] | None) -> int:
    from kvtide.simulation.run import run_plan
    from kvtide.simulation.shrink import shrink

    plan, outcome = shrink(seed)
    if not outcome.failure:
        print(f"seed {seed}: {outcome.events} events, no failure")
        return 0
    if log is not None:
        run_plan(plan, log)
    for each in fields(plan):  # compiled, it has no __dict__
        print(f"  {each.name:16} {getattr(plan, each.name)}")
    print(f"seed {seed} still fails with this plan, after {outcome.events} events: {outcome.failure}")
    return 1
