"""`kvtide doctor`: can the configured stack run on this machine? One line for each answer, with the remedy."""

import json
from collections.abc import Callable, Iterator
from typing import Literal

import msgspec
from rich.console import Console
from rich.text import Text

from kvtide.doctor_machine import compiler, core, cores, disk, kernels, memory, segment_room
from kvtide.doctor_stack import leftovers, model, port, stored, with_made_model
from kvtide.doctor_verdict import Verdict
from shared.config import Config

Check = Callable[[Config], Iterator[Verdict]]

# From what the stack can't do without to what only makes it slower.
CHECKS: tuple[Check, ...] = (model, memory, segment_room, disk, stored, port, leftovers, cores, compiler, kernels, core)
STYLES: dict[str, str] = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def diagnose(config: Config) -> list[Verdict]:
    """Every check's verdicts, in order. A check that can't find out warns; it never raises."""
    found: list[Verdict] = []
    config = with_made_model(config)
    for check in CHECKS:
        try:
            found += check(config)
        except OSError as error:
            name = check.__name__.replace("_", " ")
            found.append(Verdict("warn", name, f"can't find out: {error}", "see the message; the stack may still run"))
    return found


def worst(verdicts: list[Verdict]) -> Literal["ok", "warn", "fail"]:
    """The state of them all."""
    states = {verdict.state for verdict in verdicts}
    return "fail" if "fail" in states else "warn" if "warn" in states else "ok"


def print_verdicts(verdicts: list[Verdict], console: Console) -> None:
    """A line for each, its remedy below it, and a last line that says what it comes to."""
    width = max(len(verdict.what) for verdict in verdicts)
    for verdict in verdicts:
        line = Text.assemble((f"{verdict.state:<5}", STYLES[verdict.state]), f"{verdict.what:<{width}}  {verdict.text}")
        console.print(line, soft_wrap=True, highlight=False)
        if verdict.remedy:
            console.print(Text(f"{'':<{width + 5}}  -> {verdict.remedy}"), soft_wrap=True, highlight=False)
    ends = {
        "ok": "all is well: kvtide serve",
        "warn": "the stack can run; the lines that say warn tell what it lacks",
        "fail": "the stack can't run as configured: see the lines that say fail",
    }
    console.print(Text(ends[worst(verdicts)], style=STYLES[worst(verdicts)]), soft_wrap=True)


def as_json(verdicts: list[Verdict]) -> str:
    """One line: {"state": ..., "checks": [{"state", "what", "text", "remedy"}, ...]}."""
    return json.dumps({"state": worst(verdicts), "checks": msgspec.to_builtins(verdicts)})
