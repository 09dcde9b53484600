"""What `kvtide bench scale` makes of its samples: hit rates over time, how long they were low, a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kvtide.bench.scale_load import Asked
from kvtide.replay.plot import DOTS_PER_INCH, SIZE_INCHES, need_matplotlib, save

WINDOW_S = 20.0  # of a hit rate: about a hundred requests on two cores
STEP_S = 2.0  # between two windows
ALLOWED = 0.05  # that a hit rate may be lower than before a change
TIERS = ("device", "host", "storage")


class Rates(NamedTuple):
    """Hit tokens by prompt tokens."""

    device: float
    host: float
    storage: float

    @property
    def total(self) -> float:
        """Of all tiers."""
        return sum(self)


class Change(NamedTuple):
    """Something was done to the stack."""

    at_s: float
    what: str


class Placement(NamedTuple):
    """Cached host pages of each storage at a time."""

    at_s: float
    pages: dict[str, int]


def rates(answered: Sequence[Asked], from_s: float, to_s: float) -> Rates:
    """Of the requests that were answered in a span of time; zeros when there were none."""
    asked = [each for each in answered if from_s < each.at_s <= to_s]
    prompt = sum(each.prompt for each in asked) or 1
    return Rates(*(sum(getattr(each, tier) for each in asked) / prompt for tier in TIERS))


def low_s(answered: Sequence[Asked], changed_s: float, end_s: float, before: float) -> float:
    """Seconds after a change at which the last window ended whose hit rate was too low; 0 when none was.

    before: the hit rate before the change. Windows end between the change and `end_s`.
    """
    last, at_s = 0.0, changed_s + STEP_S
    while at_s <= end_s:
        if rates(answered, at_s - WINDOW_S, at_s).total < before - ALLOWED:
            last = at_s - changed_s
        at_s += STEP_S
    return last


def plot(
    answered: Sequence[Asked],
    placements: Sequence[Placement],
    changes: Sequence[Change],
    span_s: tuple[float, float],
    path: Path,
) -> None:
    """Hit rate by tier and pages by storage, over the span. Raises TraceError when the file can't be written."""
    pyplot = need_matplotlib()
    width, height = SIZE_INCHES
    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(width, 1.3 * height), dpi=DOTS_PER_INCH, sharex=True, layout="constrained"
    )
    begun_s, end_s = span_s
    times = [begun_s + WINDOW_S + STEP_S * step for step in range(int((end_s - begun_s - WINDOW_S) / STEP_S) + 1)]
    windows = [rates(answered, at_s - WINDOW_S, at_s) for at_s in times]
    above.stackplot([at_s - begun_s for at_s in times], *zip(*windows, strict=True), labels=TIERS, alpha=0.8)
    above.set(ylabel=f"hit tokens / prompt tokens, {WINDOW_S:g} s", ylim=(0, 1))
    storages = sorted({storage for each in placements for storage in each.pages})
    for storage in storages:
        known = [each for each in placements if storage in each.pages]
        below.plot([each.at_s - begun_s for each in known], [each.pages[storage] for each in known], label=storage)
    below.set(ylabel="cached host pages", xlabel="seconds", ylim=(0, None), xlim=(0, end_s - begun_s))
    for axes in (above, below):
        for change in changes:
            axes.axvline(change.at_s - begun_s, color="black", linestyle="--", linewidth=1)
        axes.grid(alpha=0.3)
        axes.legend(loc="lower left")
    for change in changes:
        above.annotate(change.what, (change.at_s - begun_s, 0.97), xytext=(4, 0), textcoords="offset points", va="top")
    save(pyplot, figure, path)
