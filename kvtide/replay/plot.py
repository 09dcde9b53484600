"""Hit rate over capacity, as a picture. Needs matplotlib: the optional extra `plot`."""

from pathlib import Path
from typing import Any

from kvtide.replay.studies import Curve
from kvtide.replay.trace import Trace
from shared.errors import TraceError

SIZE_INCHES = (8.0, 5.0)
DOTS_PER_INCH = 110


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
    for name, rates in curve.rates.items():
        axes.plot(curve.pages, rates, marker="o", markersize=3, linewidth=1.5, label=name)
    axes.set(
        title=f"{trace.name}, last half",
        xlabel=f"pages of {trace.page_size} tokens in device memory",
        ylabel="hit tokens / input tokens",
        xscale="log",
        ylim=(0, 1),
    )
    axes.set_xticks(curve.pages, [f"{pages:,}" for pages in curve.pages], rotation=30)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:  # ValueError: an ending that no format has
        raise TraceError(f"{path} can't be written: {error}") from error
    finally:
        pyplot.close(figure)
