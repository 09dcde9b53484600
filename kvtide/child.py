"""One child process: started, watched, started again with a back-off when it dies, stopped."""

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shared.errors import KvtideError

FIRST_DELAY_S = 0.2  # before the first restart: a crash costs little
LAST_DELAY_S = 10.0  # longest wait between two starts: a fault that heals is noticed within it
HEALTHY_S = 30.0  # a child that lived as long has started well: torch and a model need up to 20 s on a busy machine
QUICK_FAILURES = 5  # exits with status 1 in a row, each before HEALTHY_S, after which nobody expects the next to work
LOG_BYTES = 16 * 2**20  # a longer log is moved aside at the next start; one older log is kept
TAIL_BYTES = 4096  # read from the end of a log to show its last lines
TAIL_LINES = 8

Report = Callable[[str], None]


class StackError(KvtideError):
    """The stack can't be started, kept or asked."""


@dataclass(frozen=True)
class Command:
    """What one child runs."""

    identity: str  # name in reports, of its log, and in `kill`
    argv: tuple[str, ...]
    folder: Path  # working directory
    log: Path  # takes stdout and stderr
    environment: Mapping[str, str] = field(default_factory=dict)
    grace_s: float = 5.0  # from SIGTERM to SIGKILL


class Child:
    """Keeps one process alive. `keep` runs until `stop`; both are called once."""

    def __init__(self, command: Command, parent_descriptor: int, report: Report, on_start: Callable[[], None]) -> None:
        self.command = command
        self.restarts = 0
        self._descriptor = parent_descriptor
        self._report = report
        self._on_start = on_start
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid if self._process and self._process.returncode is None else None

    async def keep(self) -> None:
        """Start the process, and again each time that it ends, until `stop`.

        Raises StackError with its last lines when it fails QUICK_FAILURES times in a row.
        """
        try:
            await self._keep()
        finally:
            self._ended.set()

    async def stop(self) -> None:
        """SIGTERM, after `grace_s` SIGKILL; returns when the process is gone and will not come back."""
        self._stopping.set()
        self.send(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._ended.wait(), self.command.grace_s)
        except TimeoutError:
            self._report(f"{self.command.identity} did not stop within {self.command.grace_s:g} s: killed")
            self.send(signal.SIGKILL)
            await self._ended.wait()

    async def end(self) -> None:
        """SIGKILL at once; returns when the process is gone and will not come back."""
        self._stopping.set()
        self.send(signal.SIGKILL)
        await self._ended.wait()

    def send(self, number: int) -> None:
        """Send a signal; a process that is gone gets none."""
        if self._process and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it ended and the event loop hasn't heard of it yet
                self._process.send_signal(number)

    async def _keep(self) -> None:
        delay_s, failures = FIRST_DELAY_S, 0
        while not self._stopping.is_set():
            started = time.monotonic()
            status = await self._run_once()
            if self._stopping.is_set():
                return
            lived_s = time.monotonic() - started
            if lived_s >= HEALTHY_S:
                delay_s, failures = FIRST_DELAY_S, 0
            failures = failures + 1 if status == 1 and lived_s < HEALTHY_S else 0
            if failures == QUICK_FAILURES:
                raise StackError(self._verdict())
            self._report(
                f"{self.command.identity} ended after {lived_s:.1f} s ({describe_status(status)}), "
                f"starting it again in {delay_s:g} s; its last line: {last_lines(self.command.log)[-1]}"
            )
            await self._sleep(delay_s)
            delay_s = min(2 * delay_s, LAST_DELAY_S)
            self.restarts += 1

    async def _run_once(self) -> int:
        command = self.command
        rotate(command.log)
        with command.log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *command.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=command.folder,
                env=dict(command.environment),
                pass_fds=(self._descriptor,),
                start_new_session=True,  # a Ctrl-C in the terminal reaches the supervisor alone, which keeps the order
            )
        self._process = process
        if self._stopping.is_set():
            self.send(signal.SIGTERM)
        else:
            self._on_start()
            self._report(f"{command.identity} started (pid {process.pid})")
        return await process.wait()

    async def _sleep(self, delay_s: float) -> None:
        with contextlib.suppress(TimeoutError):  # the normal case: nobody stops it meanwhile
            await asyncio.wait_for(self._stopping.wait(), delay_s)

    def _verdict(self) -> str:
        lines = "\n".join(f"    {line}" for line in last_lines(self.command.log))
        return (
            f"{self.command.identity} failed {QUICK_FAILURES} times in a row as it started; "
            f"the end of {self.command.log} says why:\n{lines}"
        )


def describe_status(status: int) -> str:
    """A child's return code as a person says it: "exit status 1", "SIGKILL"."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def rotate(log: Path) -> None:
    """Move a log of LOG_BYTES or more aside, to one name that holds the last such log."""
    if log.exists() and log.stat().st_size >= LOG_BYTES:
        log.replace(log.with_suffix(".log.1"))


def last_lines(log: Path) -> list[str]:
    """The last TAIL_LINES lines of a log, or one that says why there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            return file.read().decode("utf-8", "replace").splitlines()[-TAIL_LINES:] or ["(empty)"]
    except OSError as error:
        return [f"({log}: {error.strerror})"]
