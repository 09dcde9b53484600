"""Runs seeds and says what came of them."""

import traceback
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from kvtide.simulation.plan import Plan, make_plan
from kvtide.simulation.world import World


class Outcome(NamedTuple):
    """One seed."""

    seed: int
    events: int  # that the core took
    failure: str  # "" = none
    where: str  # traceback of the failure
    seen: Counter[str]  # faults, states, outcomes


def run_seed(seed: int, log: Callable[[str], None] | None = None) -> Outcome:
    """Run one seed; `log` gets the trace line by line."""
    return run_plan(make_plan(seed), log)


def run_plan(plan: Plan, log: Callable[[str], None] | None = None) -> Outcome:
    """Run a seed's plan, or what is left of it."""
    world = World(plan, log)
    failure = where = ""
    try:
        world.run()
    except Exception as error:  # whatever it is, it is this seed's result
        failure = f"{type(error).__name__}: {error}"
        where = traceback.format_exc()
    seen = sum((each.shell.core.state.counters for each in world.worlds), world.seen)
    return Outcome(plan.seed, sum(each.events for each in world.worlds), failure, where, seen)
