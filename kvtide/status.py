"""`kvtide status`: ask the scheduler how it is, and show it."""

import json
from typing import Any

from rich.console import Console
from rich.table import Table

from kvtide.guest import ANSWER_TIMEOUT_S, CLI_PREFIX, ask
from shared.messages.gateway import Status, StatusWanted


async def fetch_status(endpoint: str, timeout_s: float = ANSWER_TIMEOUT_S) -> dict[str, Any]:
    """The scheduler's status as decoded JSON. Raises StackError when none answers in time."""
    answer = await ask(endpoint, StatusWanted(), Status, timeout_s)
    body: dict[str, Any] = json.loads(answer.body)
    return body


def print_status(status: dict[str, Any], console: Console) -> None:
    """The status as a few lines and small tables."""
    state = "ready" if status["ready"] else "not ready"
    held = "  ".join(f"{name} {status[name]}" for name in ("integrity", "locked", "in_flight", "quarantined"))
    console.print(f"[bold]{state}[/]  {held}", soft_wrap=True)
    if regret := status["regret"]:
        console.print(
            f"the last {regret['requests']} requests: {regret['hit_rate']:.1%} of prompt tokens from device and host, "
            f"the best cache of their size {regret['optimal_hit_rate']:.1%}",
            soft_wrap=True,
        )
    requests = "  ".join(f"{name} {count}" for name, count in status["requests"].items() if count)
    console.print(f"requests: {requests or 'none'}", soft_wrap=True)
    hosts = {f"host {storage}": pool for storage, pool in (status["host"] or {}).items()}
    for name, pool in {"device": status["device"], **hosts}.items():
        console.print(f"{name} (pages): " + "  ".join(f"{key} {value}" for key, value in pool.items()), soft_wrap=True)
    peers = Table("peer", "role", "up", "silent", box=None, pad_edge=False)
    for peer in status["peers"]:
        if not peer["identity"].startswith(CLI_PREFIX):
            peers.add_row(peer["identity"], peer["role"], "yes" if peer["up"] else "no", f"{peer['silent_s']:g} s")
    console.print(peers)
    counters = Table("counter", "value", box=None, pad_edge=False)
    for name, value in sorted(status["counters"].items()):
        counters.add_row(name, f"{value:,}")
    console.print(counters)
