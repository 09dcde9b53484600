"""Hit rate over capacity, as a picture. Needs matplotlib: the optional extra `plot`."""

from itertools import count
from pathlib import Path
from typing import Any, get_args

from kvtide.replay.studies import Curve
from kvtide.replay.trace import Trace
from services.scheduler.core.settings import Eviction
from shared.errors import TraceError

SIZE_INCHES = (8.0, 5.0)
DOTS_PER_INCH = 110
WIDEST, THINNER = 3.5, 0.35  # points: a curve is thinner than the one before it, which it may cover
HEADROOM = 1.08  # above the highest rate


def need_matplotlib() -> Any:
    """matplotlib's pyplot, drawing into files. Raises TraceError that says how to install it."""
    try:
        import matplotlib
    except ImportError:
        raise TraceError("--plot needs matplotlib, which isn't installed: pip install 'kvtide[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def plot(trace: Trace, curve: Curve, path: Path) -> None:
    """Draw the curves and their bounds. Raises TraceError when the file can't be written."""
    pyplot = need_matplotlib()
    figure, axes = pyplot.subplots(figsize=SIZE_INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    axes.plot(curve.pages, curve.optimum, color="black", marker="o", markersize=3, label="optimum")
    axes.axhline(curve.infinite, color="grey", linestyle="--", linewidth=1, label="infinite")
    names_in_order = list(get_args(Eviction))
    for width, (names, rates) in zip(count(WIDEST, -THINNER), merged(curve.rates), strict=False):
        style = {"color": f"C{names_in_order.index(names[0])}", "linewidth": width, "label": ", ".join(names)}
        axes.plot(curve.pages, rates, marker="o", markersize=width + 1, **style)
    axes.set(
        title=f"{trace.name}, last half",
        xlabel=f"pages of {trace.page_size} tokens in device memory",
        ylabel="hit tokens / input tokens",
        xscale="log",
        ylim=(0, min(1.0, HEADROOM * curve.infinite) or 1.0),
    )
    axes.set_xticks(curve.pages, [f"{pages:,}" for pages in curve.pages], rotation=30)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", framealpha=0.6)
    save(pyplot, figure, path)


def save(pyplot: Any, figure: Any, path: Path) -> None:
    """Write a picture and forget it. Raises TraceError when the file can't be written."""
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:  # ValueError: an ending that no format has
        raise TraceError(f"{path} can't be written: {error}") from error
    finally:
        pyplot.close(figure)


def merged(rates: dict[str, list[float]]) -> list[tuple[list[str], list[float]]]:
    """Names with equal curves together: one would hide the other."""
    found: list[tuple[list[str], list[float]]] = []
    for name, curve in rates.items():
        same = next((names for names, known in found if known == curve), None)
        if same is None:
            found.append(([name], curve))
        else:
            same.append(name)
    return found
