"""`kvtide simulate`: many seeds, or one with its trace."""

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable

from kvtide.simulation.run import Outcome, run_seed

DEFAULT_SEEDS = 300
SHOWN_FAILURES = 20  # failing seeds printed in full


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    """Add `simulate` to the command line."""
    parser = subparsers.add_parser("simulate", help="run the scheduler's core against simulated peers and faults")
    parser.add_argument("--seeds", type=int, default=DEFAULT_SEEDS, metavar="N", help="number of seeds")
    parser.add_argument("--start", type=int, default=0, metavar="S", help="the first of them")
    parser.add_argument("--seed", type=int, help="run this seed alone")
    parser.add_argument("--trace", action="store_true", help="print every event and command (with --seed)")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the seeds; 0 when none fails."""
    if args.seed is not None:
        return _run_one(args.seed, print if args.trace else None)
    started = time.monotonic()
    events, seen, failures = 0, Counter[str](), list[Outcome]()
    for seed in range(args.start, args.start + args.seeds):
        outcome = run_seed(seed)
        events += outcome.events
        seen.update(outcome.seen)
        if outcome.failure:
            failures.append(outcome)
            if len(failures) <= SHOWN_FAILURES:
                print(f"seed {seed}: {outcome.failure}\n  replay: kvtide simulate --seed {seed} --trace", flush=True)
    seconds = time.monotonic() - started
    result = {
        "seeds": args.seeds,
        "failures": len(failures),
        "seeds_per_s": round(args.seeds / seconds, 1),
        "events_per_seed": round(events / max(1, args.seeds)),
        "start": args.start,
        "failed_seeds": [outcome.seed for outcome in failures[:SHOWN_FAILURES]],
    }
    if args.json:
        print(json.dumps(result | {"reached": dict(sorted(seen.items()))}))
    else:
        for name, count in sorted(seen.items()):
            print(f"  {name:32} {count}")
        print(" ".join(f"{name}={value}" for name, value in result.items()))
    return 1 if failures else 0


def _run_one(seed: int, log: Callable[[str], None] | None) -> int:
    outcome = run_seed(seed, log)
    if outcome.failure:
        print(f"seed {seed} failed after {outcome.events} events\n{outcome.where}")
        return 1
    print(f"seed {seed}: {outcome.events} events, no failure")
    return 0
