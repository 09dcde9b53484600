"""`kvtide status`: ask the scheduler how it is, and show it."""

import asyncio
import itertools
import json
import os
from typing import Any, ClassVar

from rich.console import Console
from rich.table import Table

from kvtide.child import StackError
from shared.errors import ProtocolError
from shared.link import SchedulerLink
from shared.messages import ToGateway
from shared.messages.common import Message
from shared.messages.gateway import GatewayHello, Status, StatusWanted

ANSWER_TIMEOUT_S = 3.0  # a scheduler answers between two steps of a few ms; a new one is up within it

CLI_PREFIX = "cli-"  # identities of the command line, which come and go


class Guest:
    """A gateway without requests: what the command line is to a scheduler. Inside `async with` its link runs, as the
    task that entering returns."""

    _numbers: ClassVar[set[int]] = set()  # of this process's guests: two at a time need two identities

    def __init__(self, endpoint: str) -> None:
        self._number = next(number for number in itertools.count() if number not in self._numbers)
        self._numbers.add(self._number)
        self._identity = f"{CLI_PREFIX}{os.getpid()}-{self._number}"
        self.link = SchedulerLink(endpoint, self._identity, ToGateway, self)

    async def __aenter__(self) -> asyncio.Task[None]:
        self._running = asyncio.create_task(self.link.run())
        await asyncio.sleep(0)  # it has begun: only then does cancelling it close its socket
        return self._running

    async def __aexit__(self, *raised: object) -> None:
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)  # its socket is closed when this returns
        self._numbers.discard(self._number)

    def hello(self) -> Message:
        return GatewayHello(self._identity)

    def stats(self) -> dict[str, float]:
        return {}

    def busy(self) -> bool:
        return True

    def on_scheduler(self, epoch: int) -> None:
        """A scheduler has taken the hello."""
        raise NotImplementedError

    def on_lost(self) -> None:
        """The link says hello again; who waits has a deadline."""

    def on_message(self, message: Any) -> None:
        """What the scheduler says."""
        raise NotImplementedError


class _Asker(Guest):
    """Asks once, and keeps the answer."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint)
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def on_scheduler(self, epoch: int) -> None:
        self.link.send(StatusWanted())

    def on_message(self, message: Any) -> None:
        if isinstance(message, Status) and not self.answer.done():
            self.answer.set_result(message.body)


async def fetch_status(endpoint: str, timeout_s: float = ANSWER_TIMEOUT_S) -> dict[str, Any]:
    """The scheduler's status as decoded JSON. Raises StackError when none answers in time."""
    asker = _Asker(endpoint)
    try:
        async with asker as link:
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
