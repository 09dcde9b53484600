"""Real servers of other projects as child processes, on 127.0.0.1, with their output in a file."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

START_S = 90.0  # LMCache takes 2 to 12 s to import on an idle machine
END_S = 5.0


class Server:
    """A process that can be killed, paused and started again with the same command."""

    def __init__(self, command: Sequence[str], port: int, folder: Path, environment: Mapping[str, str]) -> None:
        self.port = port
        self._command = command
        self._folder = folder
        self._environment = {**os.environ, **environment}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def output(self) -> Path:
        """Where the process writes."""
        return self._folder / "server.log"

    def start(self) -> None:
        """Start it and wait until it listens. Raises RuntimeError with its last words when it doesn't."""
        self._start(lambda: _listens(self.port))

    def start_and_wait_for(self, words: str) -> None:
        """Start it and wait until it writes `words`."""
        before = self.output.read_text().count(words) if self.output.exists() else 0
        self._start(lambda: self.output.read_text().count(words) > before)

    def _start(self, ready: Callable[[], bool]) -> None:
        with self.output.open("ab") as output:
            self._process = subprocess.Popen(
                self._command, cwd=self._folder, env=self._environment, stdout=output, stderr=output
            )
        deadline_s = time.monotonic() + START_S
        while not ready():
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                self.kill()
                raise RuntimeError(f"{self._command[0]} isn't ready: {self.output.read_text()[-2000:]}")
            time.sleep(0.05)

    def kill(self) -> None:
        """kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(END_S)
            self._process = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """SIGSTOP inside the block."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
