"""The shortest history that still fails: a failing seed's plan, with everything taken out that isn't needed."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kvtide.simulation.plan import Plan, make_plan
from kvtide.simulation.run import Outcome, run_plan

MAX_RUNS = 400  # a run takes 20 ms
RATES = ("lose", "duplicate", "late", "fail_step", "fail_copy", "abort_share", "stored")


def shrink(seed: int) -> tuple[Plan, Outcome]:
    """The smallest plan found that fails as the seed does; the seed's own plan when it doesn't fail."""
    plan = make_plan(seed)
    outcome = run_plan(plan)
    if not outcome.failure:
        return plan, outcome
    runs = 0
    progress = True
    while progress and runs < MAX_RUNS:
        progress = False
        for smaller in _smaller(plan):
            runs += 1
            tried = run_plan(smaller)
            if tried.failure and _kind(tried) == _kind(outcome) and tried.events <= outcome.events:
                plan, outcome, progress = smaller, tried, True
                break
            if runs >= MAX_RUNS:
                break
    return plan, outcome


def _kind(outcome: Outcome) -> str:
    return outcome.failure.split(":")[0]


def _smaller(plan: Plan) -> Iterator[Plan]:
    for at in range(len(plan.faults)):
        yield replace(plan, faults=[*plan.faults[:at], *plan.faults[at + 1 :]])
    if plan.replica:
        yield replace(plan, replica=False)
    for name in RATES:
        if getattr(plan, name):
            changed: dict[str, Any] = {name: 0.0}
            yield replace(plan, **changed)
    for requests in (plan.requests // 2, plan.requests - 1):
        if requests > 0:
            yield replace(plan, requests=requests)
    if len(plan.backends) > 1:
        yield replace(plan, backends=plan.backends[:-1], joins=plan.joins[:-1])
    if plan.settings.tp_size > 1:
        yield replace(plan, settings=plan.settings._replace(tp_size=1))
    if plan.families > 1:
        yield replace(plan, families=plan.families - 1)
    if plan.max_steps > 1:
        yield replace(plan, max_steps=1)
