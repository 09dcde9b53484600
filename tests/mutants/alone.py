"""`python -m tests.mutants.alone NAME SEEDS`: plant one fault and run seeds until one fails, or the test that finds it.

Prints the number of seeds that it took, and why the last one failed.
"""

import sys

import pytest

from tests.mutants.mutants import MUTANTS
from tests.mutants.planting import plant


def main(name: str, seeds: int) -> int:
    """0 when the fault was found."""
    mutant = next(each for each in MUTANTS if each.name == name)
    plant(mutant)
    if mutant.test:
        failed = (
            pytest.main(["-q", "--no-header", "-p", "no:cacheprovider", mutant.test]) == pytest.ExitCode.TESTS_FAILED
        )
        print("0 " + mutant.test if failed else "its test passes")
        return 0 if failed else 1
    from kvtide.simulation.run import run_seed

    for count in range(1, seeds + 1):
        outcome = run_seed(mutant.start + count - 1)
        if outcome.failure:
            print(f"{count} {outcome.failure}")
            return 0
    print(f"none of {seeds} seeds failed")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
