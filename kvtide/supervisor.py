"""Keeps a group of child processes: starts them, restarts the dead, stops them in order, outlives none of them."""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType

from kvtide.child import Child, Command, Report, StackError
from shared.service import PARENT_VARIABLE


class Supervisor:
    """An async context manager: inside it the children run; leaving it stops them in the order of `stop_order`.

    Every child holds the read end of a pipe whose write end is here alone: when this process dies, however it dies,
    the pipe ends and so do they (`shared/service.py`).
    """

    def __init__(
        self,
        commands: Sequence[Command],
        stop_order: Sequence[str],
        report: Report,
        on_change: Callable[[Mapping[str, int]], None],
    ) -> None:
        """`on_change` gets the pids of all children whenever one has started."""
        read_end, self._write_end = os.pipe()
        self._read_end = read_end
        self._on_change = on_change
        self.children = {
            command.identity: Child(self._linked(command), read_end, report, self._changed) for command in commands
        }
        self._stop_order = [self.children[identity] for identity in stop_order]
        self._keepers: list[asyncio.Task[None]] = []

    def _linked(self, command: Command) -> Command:
        return replace(command, environment={**command.environment, PARENT_VARIABLE: str(self._read_end)})

    def _changed(self) -> None:
        self._on_change(self.pids)

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the children that run, by identity."""
        return {identity: child.pid for identity, child in self.children.items() if child.pid is not None}

    def send(self, identity: str, number: int) -> None:
        """Send a signal to a child. Raises StackError when there is none of that name."""
        if identity not in self.children:
            raise StackError(f"no child is called {identity!r}; there are {', '.join(self.children)}")
        self.children[identity].send(number)

    async def watch(self) -> None:
        """Wait until a child is given up, then raise its StackError."""
        done, _ = await asyncio.wait(self._keepers, return_when=asyncio.FIRST_EXCEPTION)
        for keeper in done:
            keeper.result()

    async def __aenter__(self) -> "Supervisor":
        self._keepers = [asyncio.create_task(child.keep()) for child in self.children.values()]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            for child in self._stop_order:
                await child.stop()
        finally:
            # Cancelled while it stops (a second Ctrl-C): no more grace. Else all are gone and this costs nothing.
            await asyncio.shield(self._end_all())

    async def _end_all(self) -> None:
        await asyncio.gather(*(child.end() for child in self.children.values()))
        await asyncio.gather(*self._keepers, return_exceptions=True)  # a verdict was raised by `watch`
        os.close(self._read_end)
        os.close(self._write_end)
