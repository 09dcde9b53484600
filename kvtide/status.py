"""`kvtide status`: ask the scheduler how it is, and show it."""

import asyncio
import json
import os
from typing import Any

from rich.console import Console
from rich.table import Table

from kvtide.child import StackError
from shared.errors import ProtocolError
from shared.link import SchedulerLink
from shared.messages import ToGateway
from shared.messages.common import Message
from shared.messages.gateway import GatewayHello, Status, StatusWanted

ANSWER_TIMEOUT_S = 3.0  # a scheduler answers between two steps of a few ms; a new one is up within it

POOL_COLUMNS = ("total", "free", "evictable", "protected", "requests", "in_flight", "quarantined")
PEER_COLUMNS = ("identity", "role", "up", "epoch")


class _Asker:
    """A gateway without requests: it says hello, asks once, and keeps the answer."""

    def __init__(self, endpoint: str) -> None:
        self._identity = f"cli-{os.getpid()}"
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.link = SchedulerLink(endpoint, self._identity, ToGateway, self)

    def hello(self) -> Message:
        return GatewayHello(self._identity)

    def stats(self) -> dict[str, float]:
        return {}

    def busy(self) -> bool:
        return True

    def on_scheduler(self, epoch: int) -> None:
        self.link.send(StatusWanted())

    def on_lost(self) -> None:
        """The deadline of `fetch_status` ends it."""

    def on_message(self, message: Any) -> None:
        if isinstance(message, Status) and not self.answer.done():
            self.answer.set_result(message.body)


async def fetch_status(endpoint: str, timeout_s: float = ANSWER_TIMEOUT_S) -> dict[str, Any]:
    """The scheduler's status as decoded JSON. Raises StackError when none answers in time."""
    asker = _Asker(endpoint)
    link = asyncio.create_task(asker.link.run())
    try:
        first: list[asyncio.Future[Any]] = [asker.answer, link]
        await asyncio.wait(first, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if link.done():
            link.result()
        if not asker.answer.done():
            raise StackError(
                f"no scheduler answers at {endpoint} within {timeout_s:g} s; "
                "is the stack running (kvtide serve), with the same --config and --set?"
            )
        body: dict[str, Any] = json.loads(asker.answer.result())
        return body
    except ProtocolError as error:
        raise StackError(f"the scheduler at {endpoint} refuses to say: {error}") from None
    finally:
        link.cancel()
        await asyncio.gather(link, return_exceptions=True)  # its socket is closed when this returns


def print_status(status: dict[str, Any], console: Console) -> None:
    """The status as three small tables."""
    state = "ready" if status.get("ready") else "not ready"
    requests = "  ".join(f"{name} {count}" for name, count in status.get("requests", {}).items())
    console.print(
        f"[bold]{state}[/]  integrity {status.get('integrity')}  locked {status.get('locked')}  "
        f"in flight {status.get('in_flight')}  quarantined {status.get('quarantined')}"
    )
    console.print(f"requests: {requests or 'none'}")
    pools = _table("pool (pages)", POOL_COLUMNS)
    for name in ("device", "host"):
        for label, pool in _pools(name, status.get(name)):
            pools.add_row(label, *(str(pool.get(column, "")) for column in POOL_COLUMNS))
    console.print(pools)
    peers = _table("", PEER_COLUMNS)
    for peer in status.get("peers", []):
        peers.add_row("", *(str(peer.get(column, "")) for column in PEER_COLUMNS))
    console.print(peers)
    counters = _table("counter", ("value",))
    for name, value in sorted(status.get("counters", {}).items()):
        counters.add_row(name, f"{value:g}")
    console.print(counters)


def _pools(name: str, pool: dict[str, Any] | None) -> list[tuple[str, dict[str, Any]]]:
    if not pool:
        return [(name, {})]
    if "total" in pool:
        return [(name, pool)]
    return [(f"{name} {storage}", one) for storage, one in pool.items() if isinstance(one, dict)]


def _table(first: str, columns: tuple[str, ...]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(first)
    for column in columns:
        table.add_column(column.replace("_", " "), justify="right" if first else "left")
    return table
