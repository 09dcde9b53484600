"""What a replay has shown: rates over the whole trace and over its second half, as a table or as one JSON object."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from kvtide.replay.driver import Outcome
from kvtide.replay.optimum import Bounds
from kvtide.replay.peers import Tiers
from kvtide.replay.trace import Trace

DIGITS = 4  # of a rate


class Rates(NamedTuple):
    """Hit tokens / input tokens of a stretch of requests."""

    hit_rate: float
    optimal_hit_rate: float  # of the best possible policy with as many pages in all tiers together
    infinite_hit_rate: float  # of a cache that never evicts


class Report(NamedTuple):
    """One replay beside its bounds."""

    whole: Rates
    last_half: Rates  # after the first half has warmed the cache
    tiers: dict[str, dict[str, float]]
    recomputed_tokens: int  # that a tier had held before
    written_per_hit: float  # tokens copied to host and L3 for each hit token


def rate(trace: Trace, tokens: Sequence[int], first: int = 0) -> float:
    """Hit tokens / input tokens of the requests from `first` on."""
    return round(sum(tokens[first:]) / sum(request.input_tokens for request in trace.requests[first:]), DIGITS)


def in_tokens(trace: Trace, pages: Sequence[int]) -> list[int]:
    """Leading pages of each request, in tokens: a partial last page weighs what it holds."""
    return [
        min(count * trace.page_size, request.input_tokens) for count, request in zip(pages, trace.requests, strict=True)
    ]


def report(trace: Trace, bounds: Bounds, tiers: Tiers, outcome: Outcome, best: list[int]) -> Report:
    """Put a replay beside its bounds. `best`: `Bounds.optimum` of the tiers' pages."""
    got = [hits.total for hits in outcome.hits]
    infinite = in_tokens(trace, bounds.infinite)
    held = in_tokens(trace, [min(pages, tiers.device) for pages in bounds.infinite])
    optimal = in_tokens(trace, best)
    half = len(trace.requests) // 2
    whole, last_half = (
        Rates(*(rate(trace, tokens, first) for tokens in (got, optimal, infinite))) for first in (0, half)
    )
    given = {name: [getattr(hits, name) for hits in outcome.hits] for name in ("device", "host", "storage")}
    written = (outcome.written_host_pages + outcome.written_storage_pages) * trace.page_size
    return Report(
        whole,
        last_half,
        {
            name: {
                "pages": pages,
                "hit_tokens": sum(given[name]),
                "hit_rate": rate(trace, given[name]),
                "last_half_hit_rate": rate(trace, given[name], half),
            }
            for name, pages in tiers._asdict().items()
            if pages
        },
        sum(max(0, had - hit) for had, hit in zip(held, got, strict=True)),
        round(written / max(1, sum(got)), DIGITS),
    )


def as_json(trace: Trace, found: Report, ttft: dict[str, float] | None) -> dict[str, Any]:
    """The object that `--json` ends with."""
    return {
        "trace": trace.name,
        "requests": len(trace.requests),
        "whole": found.whole._asdict(),
        "last_half": found.last_half._asdict(),
        "tiers": found.tiers,
        "ttft": ttft,
        "recomputed_tokens": found.recomputed_tokens,
        "written_tokens_per_hit_token": found.written_per_hit,
        "page_size": trace.page_size,
        "bad_lines": len(trace.bad),
    }


def show(trace: Trace, bounds: Bounds, found: Report, ttft: dict[str, float] | None, console: Console) -> None:
    """The same for a person."""
    console.print(
        f"{trace.name}: {len(trace.requests):,} requests, {bounds.unique_pages:,} different pages of "
        f"{trace.page_size} tokens",
        highlight=False,
    )
    rates = Table("hit rate", "whole", "last half", box=None, pad_edge=False)
    for name, label in (("hit_rate", "replay"), ("optimal_hit_rate", "optimum"), ("infinite_hit_rate", "infinite")):
        rates.add_row(label, f"{getattr(found.whole, name):.3f}", f"{getattr(found.last_half, name):.3f}")
    for name, tier in found.tiers.items() if len(found.tiers) > 1 else ():
        rates.add_row(f"  from {name}", f"{tier['hit_rate']:.3f}", f"{tier['last_half_hit_rate']:.3f}")
    console.print(rates)
    console.print(
        f"recomputed though a tier had it: {found.recomputed_tokens:,} tokens; "
        f"written to host and storage: {found.written_per_hit:.2f} tokens for each hit token",
        highlight=False,
    )
    if ttft is not None:
        console.print("TTFT: " + "  ".join(f"{name} {value:.2f} s" for name, value in ttft.items()), highlight=False)
