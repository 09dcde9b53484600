"""The demo's numbers: one row for each phase, and one line of JSON for all."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from rich import box
from rich.table import Table

from kvtide.chat_client import Answer
from kvtide.oracle import Verdict


@dataclass(frozen=True)
class Phase:
    """Answers of one part of the demo."""

    name: str
    answers: Sequence[Answer]

    @property
    def prompt_tokens(self) -> int:
        """Over all requests."""
        return sum(answer.prompt_tokens for answer in self.answers)

    @property
    def device_tokens(self) -> int:
        """Prompt tokens found in the device pool."""
        return sum(answer.device_tokens for answer in self.answers)

    @property
    def host_tokens(self) -> int:
        """Prompt tokens found in the host pool."""
        return sum(answer.host_tokens for answer in self.answers)

    @property
    def storage_tokens(self) -> int:
        """Prompt tokens found in L3."""
        return sum(answer.storage_tokens for answer in self.answers)


class Result(msgspec.Struct, frozen=True):
    """The line of JSON. Hits and requests are those of the tiered phases."""

    sessions: int
    requests: int
    prompt_tokens: int
    device_hit_tokens: int
    host_hit_tokens: int
    storage_hit_tokens: int
    after_restart_storage_hit_tokens: int
    tokens_checked: int
    tokens_wrong: int
    ttft_speedup_p50: float  # later turns: median TTFT with the device tree only / with three tiers
    wall_s: float


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0..1) of the others lie, interpolated; NaN when there are none."""
    if not values:
        return math.nan
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    return low + (high - low) * (place - math.floor(place))


def summarize(
    tiered: Phase,
    restarted: Phase,
    later: Sequence[float],
    later_device_only: Sequence[float],
    sessions: int,
    verdict: Verdict,
    wall_s: float,
) -> Result:
    """`later` and `later_device_only`: TTFT in s of the turns after the first, before the restart."""
    both = Phase("", [*tiered.answers, *restarted.answers])
    return Result(
        sessions=sessions,
        requests=len(both.answers),
        prompt_tokens=both.prompt_tokens,
        device_hit_tokens=both.device_tokens,
        host_hit_tokens=both.host_tokens,
        storage_hit_tokens=both.storage_tokens,
        after_restart_storage_hit_tokens=restarted.storage_tokens,
        tokens_checked=verdict.checked,
        tokens_wrong=verdict.wrong,
        ttft_speedup_p50=round(percentile(later_device_only, 0.5) / percentile(later, 0.5), 2),
        wall_s=round(wall_s, 1),
    )


def table(phases: Sequence[Phase]) -> Table:
    """One row for each phase."""
    result = Table(title="prompt tokens by the tier that had them, and time to first token", box=box.SIMPLE_HEAD)
    result.add_column("phase", no_wrap=True)
    for column in ("requests", "prompt", "device", "host", "storage", "computed", "TTFT p50", "p95"):
        result.add_column(column, justify="right", no_wrap=True)
    for phase in phases:
        hits = (phase.device_tokens, phase.host_tokens, phase.storage_tokens)
        times = [answer.ttft_s for answer in phase.answers]
        counts = (len(phase.answers), phase.prompt_tokens, *hits, phase.prompt_tokens - sum(hits))
        result.add_row(
            phase.name,
            *(f"{count:,}" for count in counts),
            *(f"{percentile(times, share):.2f} s" for share in (0.5, 0.95)),
        )
    return result
