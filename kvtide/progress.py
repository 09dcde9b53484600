"""How far a long command is: a bar on a terminal, plain lines elsewhere."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

PLAIN_WIDTH = 120
LINE_INTERVAL_S = 5.0  # between two plain lines of one step: a log of a run of minutes stays on a screen


class Reporter(Protocol):
    """Takes steps, each with a number of units."""

    def step(self, name: str, total: int) -> None:
        """A new step begins."""

    def advance(self, done: int | None = None) -> None:
        """One more unit of the step is done, or `done` in all."""

    def say(self, line: str) -> None:
        """One line for the reader."""


class _Bar:
    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task: TaskID | None = None

    def step(self, name: str, total: int) -> None:
        self._task = self._progress.add_task(name, total=total)

    def advance(self, done: int | None = None) -> None:
        assert self._task is not None
        if done is None:
            self._progress.advance(self._task)
        else:
            self._progress.update(self._task, completed=done)

    def say(self, line: str) -> None:
        self._progress.console.print(line, highlight=False, markup=False)


class _Lines:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._name, self._done, self._total, self._said_s = "", 0, 0, 0.0

    def step(self, name: str, total: int) -> None:
        self._name, self._done, self._total, self._said_s = name, 0, total, 0.0

    def advance(self, done: int | None = None) -> None:
        before, self._done = self._done, self._done + 1 if done is None else done
        now = time.monotonic()
        if self._done > before and (self._done == self._total or now - self._said_s >= LINE_INTERVAL_S):
            self._said_s = now
            self.say(f"{self._name}: {self._done:,} of {self._total:,}")

    def say(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


def console(stderr: bool) -> Console:
    """A console; where there is no terminal, its lines are as long as the widest table."""
    found = Console(stderr=stderr)
    return found if found.is_terminal else Console(stderr=stderr, width=PLAIN_WIDTH)


@contextmanager
def reporter(console: Console) -> Iterator[Reporter]:
    """A reporter for this console."""
    if not console.is_terminal:
        yield _Lines(console)
        return
    columns = (TextColumn("{task.description:32}"), BarColumn(), TextColumn("{task.completed:.0f}/{task.total:.0f}"))
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        yield _Bar(progress)
