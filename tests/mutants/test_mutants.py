"""Every planted fault still has its place in the source, and the quick ones are found. All: `make test-mutants`."""

import subprocess
import sys

import pytest

from tests.mutants.mutants import MUTANTS
from tests.mutants.planting import ROOT, Mutant, planted

QUICK = (
    "unlock by path instead of by receipt", "a split forgets its second part", "pages matched while still loading",
    "a namespace skipped", "duplicates not freed", "tail page not freed", "op_id reused", "hits counted twice",
    "evict of a locked leaf",
)  # fmt: skip
QUICK_SEEDS = 20


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_fault_can_be_planted(mutant: Mutant) -> None:
    for path in {ROOT / edit.path for edit in mutant.edits}:
        source = path.read_text(encoding="utf-8")
        changed = planted(path, source, mutant.edits)
        assert changed != source
        compile(changed, str(path), "exec")


def test_there_are_at_least_twenty_and_no_two_of_one_name() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 20


@pytest.mark.parametrize("name", QUICK)
def test_a_fault_that_shows_at_once_is_found(name: str) -> None:
    command = [sys.executable, "-m", "tests.mutants.alone", name, str(QUICK_SEEDS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
