"""Many replays of one trace: all policies side by side, hit rate over capacity, the smallest sizes for a hit rate."""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from kvtide.progress import Reporter
from kvtide.replay.driver import replay
from kvtide.replay.optimum import Bounds
from kvtide.replay.peers import Tiers
from kvtide.replay.report import Report, in_tokens, rate, report
from kvtide.replay.trace import Ids, Trace

SHARES = (0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5)  # of a trace's different pages: where a curve is measured
CLOSE_ENOUGH = 1.02  # a size that is found is at most 2 % above the smallest


class Study(NamedTuple):
    """One trace, and who is told how far it is."""

    trace: Trace
    pages: list[Ids]
    bounds: Bounds
    progress: Reporter

    def measure(self, name: str, tiers: Tiers, eviction: str, write_policy: str) -> Report:
        """One replay."""
        self.progress.step(name, len(self.pages))
        outcome = replay(self.trace, self.pages, tiers, eviction, write_policy, self.progress.advance)
        return report(self.trace, self.bounds, tiers, outcome, self.bounds.optimum(sum(tiers)))

    def best(self, capacity: int) -> float:
        """The optimum's hit rate over the last half."""
        return rate(self.trace, in_tokens(self.trace, self.bounds.optimum(capacity)), len(self.pages) // 2)


def compare(
    study: Study, tiers: Tiers, evictions: Sequence[str], write_policies: Sequence[str], kv_bytes: int
) -> list[dict[str, Any]]:
    """Every strategy with every write policy, the best first. `kv_bytes`: of a token."""
    rows = []
    for eviction, write_policy in product(evictions, write_policies if tiers.host else write_policies[:1]):
        name = f"{eviction} {write_policy}" if tiers.host else eviction
        found = study.measure(name, tiers, eviction, write_policy)
        rows.append({
            "eviction": eviction,
            "write_policy": write_policy if tiers.host else None,
            "hit_rate": found.whole.hit_rate,
            "last_half_hit_rate": found.last_half.hit_rate,
            "written_bytes_per_hit_token": round(found.written_per_hit * kv_bytes),
            "recomputed_tokens": found.recomputed_tokens,
        })  # fmt: skip
    return sorted(rows, key=lambda row: -row["last_half_hit_rate"])


def show_comparison(rows: list[dict[str, Any]], console: Console) -> None:
    """The same for a person."""
    headers = ("eviction", "write policy", "whole", "last half", "bytes written / hit token", "recomputed tokens")
    table = Table(*headers, box=None, pad_edge=False)
    for row in rows:
        table.add_row(
            row["eviction"], row["write_policy"] or "-", f"{row['hit_rate']:.3f}", f"{row['last_half_hit_rate']:.3f}",
            f"{row['written_bytes_per_hit_token']:,}", f"{row['recomputed_tokens']:,}",
        )  # fmt: skip
    console.print(table)


class Curve(NamedTuple):
    """Hit rate over the last half at each capacity, L1 alone."""

    pages: list[int]
    optimum: list[float]
    infinite: float
    rates: dict[str, list[float]]  # by eviction strategy


def curve(study: Study, evictions: Sequence[str], write_policy: str) -> Curve:
    """Measure the strategies at `SHARES` of the trace's different pages."""
    sizes = [max(1, round(share * study.bounds.unique_pages)) for share in SHARES]
    rates = {
        eviction: [
            study.measure(f"{eviction} {size:,} pages", Tiers(size), eviction, write_policy).last_half.hit_rate
            for size in sizes
        ]
        for eviction in evictions
    }
    infinite = rate(study.trace, in_tokens(study.trace, study.bounds.infinite), len(study.pages) // 2)
    return Curve(sizes, [study.best(size) for size in sizes], infinite, rates)


def sweep(study: Study, wanted: float, tiers: Tiers, eviction: str, write_policy: str) -> list[dict[str, Any]]:
    """The smallest size of each tier that brings the hit rate over the last half to `wanted`; None = no size does.

    First L1 alone; then, where sizes are given, host pages beside the given L1, and storage pages beside both.
    """
    rows: list[dict[str, Any]] = []
    for tier, fixed in _tiers_to_size(tiers):
        smallest = None
        low, high = 1, study.bounds.unique_pages
        if _reaches(study, wanted, fixed, tier, high, eviction, write_policy):
            while high > low * CLOSE_ENOUGH and high - low > 1:
                middle = round((low * high) ** 0.5)
                middle = min(max(middle, low + 1), high - 1)
                if _reaches(study, wanted, fixed, tier, middle, eviction, write_policy):
                    high = middle
                else:
                    low = middle
            smallest = fixed._replace(**{tier: high})
        sizes = smallest._asdict() if smallest is not None else None
        rows.append({"tier": tier, "wanted_hit_rate": wanted, "pages": sizes})
    return rows


def _tiers_to_size(tiers: Tiers) -> Iterator[tuple[str, Tiers]]:
    yield "device", Tiers(1)
    if tiers.device:
        yield "host", Tiers(tiers.device)
    if tiers.device and tiers.host:
        yield "storage", Tiers(tiers.device, tiers.host)


def _reaches(
    study: Study, wanted: float, fixed: Tiers, tier: str, pages: int, eviction: str, write_policy: str
) -> bool:
    found = study.measure(f"{tier} {pages:,} pages", fixed._replace(**{tier: pages}), eviction, write_policy)
    return found.last_half.hit_rate >= wanted


def show_sweep(rows: list[dict[str, Any]], console: Console) -> None:
    """The same for a person."""
    for row in rows:
        sizes = row["pages"]
        text = "no size is enough" if sizes is None else _sizes(sizes)
        console.print(f"hit rate {row['wanted_hit_rate']:g} by {row['tier']} pages: {text}", highlight=False)


def _sizes(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name} {pages:,}" for name, pages in sizes.items() if pages)
