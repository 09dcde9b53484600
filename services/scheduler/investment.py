"""METRIC-02: what a bad investment costs. Bytes written for each token that came back, pages dropped unread."""

from collections.abc import Iterable, Mapping
from typing import Any

TIERS = ("device", "host", "storage")


def investment(counters: Mapping[str, int], stats: Iterable[Mapping[str, float]]) -> dict[str, Any]:
    """From the core's counters and what workers and storages count; a process that starts anew counts from 0."""
    told = list(stats)
    written = {"host": _sum(told, "write_bytes"), "storage": _sum(told, "l3_set_bytes")}
    unread = {
        "host": counters.get("host_evicted_unread_pages", 0),
        "storage": int(_sum(told, "l3_evicted_unread")),
    }
    found: dict[str, Any] = {
        tier: {
            "written_bytes": int(written[tier]),
            "hit_tokens": counters.get(f"{tier}_hit_tokens", 0),
            "bytes_per_hit_token": _ratio(written[tier], counters.get(f"{tier}_hit_tokens", 0)),
            "evicted_unread_pages": unread[tier],
        }
        for tier in written
    }
    again = {tier: counters.get(f"recomputed_{tier}_tokens", 0) for tier in TIERS}
    return found | {"recomputed_tokens": again | {"any": counters.get("recomputed_tokens", 0)}}


def _sum(stats: list[Mapping[str, float]], name: str) -> float:
    return sum(each.get(name, 0.0) for each in stats)


def _ratio(written: float, tokens: int) -> float | None:
    """None while nothing has come back."""
    return round(written / tokens, 1) if tokens else None
