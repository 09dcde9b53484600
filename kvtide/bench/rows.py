"""What a benchmark says: rows of a value, its peer in the same run, and its goal."""

import statistics
from collections.abc import Sequence

import msgspec
from rich.table import Table

from kvtide.progress import console


class Row(msgspec.Struct, frozen=True):
    """One measurement. Made by `compared`, `at_most` or `plain`."""

    what: str  # with the conditions that matter: sizes, threads, rounds
    value: float
    unit: str
    peer: str | None = None  # what it is compared with
    peer_value: float | None = None  # in the same unit
    ratio: float | None = None
    goal: str | None = None  # of the ratio where there is a peer, else of the value
    ok: bool | None = None  # None without a goal


class Result(msgspec.Struct, frozen=True):
    """The line of JSON."""

    bench: str
    rows: list[Row]


def compared(
    what: str, unit: str, peer: str, values: Sequence[float], peer_values: Sequence[float], at_least: float | None
) -> Row:
    """Rounds beside rounds of a peer: medians, and the median of each round's ratio, which a busy machine disturbs
    least. The values are rates: more is better."""
    ratio = statistics.median(value / other for value, other in zip(values, peer_values, strict=True))
    return Row(
        what,
        statistics.median(values),
        unit,
        peer,
        statistics.median(peer_values),
        ratio,
        goal=None if at_least is None else f">= {at_least:g}",
        ok=None if at_least is None else ratio >= at_least,
    )


def times(
    what: str,
    unit: str,
    peer: str,
    values: Sequence[float],
    peer_values: Sequence[float],
    at_most: float | None = None,
    at_least: float | None = None,
) -> Row:
    """Rounds of a time beside rounds of another time, as in `compared`: the ratio says how many times as long."""
    ratio = statistics.median(value / other for value, other in zip(values, peer_values, strict=True))
    bounds = {"<=": at_most, ">=": at_least}
    goals = [f"{sign} {bound:g}" for sign, bound in bounds.items() if bound is not None]
    ok = (at_most is None or ratio <= at_most) and (at_least is None or ratio >= at_least)
    medians = statistics.median(values), statistics.median(peer_values)
    return Row(
        what, medians[0], unit, peer, medians[1], ratio, goal=" and ".join(goals) or None, ok=ok if goals else None
    )


def at_most(what: str, unit: str, values: Sequence[float], limit: float) -> Row:
    """The median of rounds against a limit."""
    value = statistics.median(values)
    return Row(what, value, unit, goal=f"<= {limit:g}", ok=value <= limit)


def plain(what: str, unit: str, values: Sequence[float]) -> Row:
    """The median of rounds."""
    return Row(what, statistics.median(values), unit)


def report(bench: str, rows: Sequence[Row], as_json: bool) -> int:
    """Print a table, or with `as_json` the line of JSON on stdout and the table on stderr.

    Returns the exit status: 1 when a goal was missed.
    """
    table = Table("what", "value", "unit", "peer", "its value", "ratio", "goal", "", title=f"bench {bench}")
    for row in rows:
        mark = "" if row.ok is None else "ok" if row.ok else "missed"
        numbers = (_number(row.value), row.unit, row.peer or "", _number(row.peer_value), _number(row.ratio))
        table.add_row(row.what, *numbers, row.goal or "", mark)
    console(stderr=as_json).print(table)
    if as_json:
        print(msgspec.json.encode(Result(bench, [_rounded(row) for row in rows])).decode(), flush=True)
    return 1 if any(row.ok is False for row in rows) else 0


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _rounded(row: Row) -> Row:
    digits = {
        name: float(f"{number:.4g}")
        for name in ("value", "peer_value", "ratio")
        if (number := getattr(row, name)) is not None
    }
    return msgspec.structs.replace(row, **digits)
