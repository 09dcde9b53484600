"""`python -m tests.mutants.alone NAME SEEDS`: plant one fault, run seeds until one fails, print its number and why."""

import sys

from tests.mutants.mutants import MUTANTS
from tests.mutants.planting import plant


def main(name: str, seeds: int) -> int:
    """0 when a seed has failed."""
    mutant = next(each for each in MUTANTS if each.name == name)
    plant(mutant)
    from kvtide.simulation.run import run_seed

    for count in range(1, seeds + 1):
        outcome = run_seed(mutant.start + count - 1)
        if outcome.failure:
            print(f"{outcome.seed} {outcome.failure}")
            return 0
    print(f"none of {seeds} seeds failed")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
