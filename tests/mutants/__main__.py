"""`make test-mutants`: each planted fault, and the seed that found it. Names as arguments choose some."""

import subprocess
import sys
import time

from tests.mutants.mutants import MUTANTS
from tests.mutants.planting import ROOT

SEEDS = 2000  # within which a fault must be seen
TIMEOUT_S = 600.0  # 2,000 seeds take 100 s on a slow core


def main(names: list[str]) -> int:
    """The number of faults that no seed has found."""
    missed = 0
    for mutant in MUTANTS:
        if names and mutant.name not in names:
            continue
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "tests.mutants.alone", mutant.name, str(SEEDS)],
            cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
        line = done.stdout.strip().splitlines()[-1:] or [done.stderr.strip().splitlines()[-1]]
        seed, _, why = line[0].partition(" ")
        caught = done.returncode == 0
        missed += not caught
        verdict = f"seeds={int(seed) - mutant.start + 1} seed={seed} {why[:110]}" if caught else f"MISSED {line[0]}"
        print(f"{mutant.name:44} {time.monotonic() - started:5.1f} s  {verdict}", flush=True)
    print(f"{missed} of {len(MUTANTS)} faults were not found" if missed else "every fault was found")
    return min(missed, 100)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
