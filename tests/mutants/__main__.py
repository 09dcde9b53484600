"""`make test-mutants`: each planted fault, and the seed that found it. Names as arguments choose some."""

import argparse
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import NamedTuple

from tests.mutants.mutants import MUTANTS
from tests.mutants.planting import ROOT, Mutant

SEEDS = 2000  # within which a fault must be seen
TIMEOUT_S = 3600.0  # 2,000 seeds take 80 s of a core; others may want it too


class Verdict(NamedTuple):
    """What came of one fault."""

    name: str
    caught: bool
    text: str


def main(arguments: list[str]) -> int:
    """The number of faults that no seed has found."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="of faults (all)")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="tried for each at most (%(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="faults at a time (%(default)s)")
    args = parser.parse_args(arguments)
    unknown = set(args.names) - {mutant.name for mutant in MUTANTS}
    if unknown:
        parser.error(f"no such fault: {', '.join(sorted(unknown))}")
    chosen = [mutant for mutant in MUTANTS if not args.names or mutant.name in args.names]
    missed = []
    with ThreadPoolExecutor(args.jobs) as pool:
        for future in as_completed([pool.submit(_try, mutant, args.seeds) for mutant in chosen]):
            verdict = future.result()
            print(f"{verdict.name:48} {verdict.text}", flush=True)
            if not verdict.caught:
                missed.append(verdict.name)
    print(
        f"{len(missed)} of {len(chosen)} faults were not found: {', '.join(missed)}"
        if missed
        else "every fault was found"
    )
    return min(len(missed), 100)


def _try(mutant: Mutant, seeds: int) -> Verdict:
    started = time.monotonic()
    command = [sys.executable, "-m", "tests.mutants.alone", mutant.name, str(seeds)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    seconds = f"{time.monotonic() - started:6.1f} s "
    line = (done.stdout.strip() or done.stderr.strip() or "it said nothing").splitlines()[-1]
    if done.returncode:
        return Verdict(mutant.name, False, f"{seconds} MISSED: {line}")
    count, _, why = line.partition(" ")
    return Verdict(mutant.name, True, f"{seconds} {f'seeds={count}' if int(count) else 'its test:'} {why[:110]}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
