"""A peer's process: it runs one job at a time and answers with what it returns, its seconds as a rule."""

import json
import select
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

from shared.errors import KvtideError

JOBS = Path(__file__).parents[3] / "bench" / "peers" / "sglang_jobs.py"
START_TIMEOUT_S = 300.0  # the imports take 10 s, on a busy machine much longer
JOB_TIMEOUT_S = 300.0  # the longest job takes 10 s


class PeerError(KvtideError):
    """A peer's process did not do its job."""


class Peer:
    """`with Peer(...) as peer`: the process ends with the block."""

    def __init__(self, folder: Path, version: str, prompts: Path, jobs: Path = JOBS) -> None:
        """folder: made by bench/peers/setup. prompts: the folder that `jobs`, a program beside JOBS, works in."""
        python, wheel = folder / "venv" / "bin" / "python", folder / version
        if not python.exists() or not wheel.exists():
            raise PeerError(f"{folder} has no {version}; run: bench/peers/setup {folder}")
        command = [str(python), str(jobs), str(wheel), str(prompts)]
        self._name, self._jobs = version, jobs
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=prompts
        )

    def __enter__(self) -> "Peer":
        self._answer(START_TIMEOUT_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def seconds(self, function: str, workload: str, **arguments: Any) -> float:
        """What a job took. Raises PeerError when the process ended or is silent."""
        return float(self.ask(function, workload, **arguments))

    def ask(self, function: str, workload: str, **arguments: Any) -> Any:
        """What a job returns. Raises PeerError when the process ended or is silent."""
        assert self._process.stdin is not None
        try:
            print(json.dumps([function, workload, arguments]), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise PeerError(f"{self._name} has ended before {function} {arguments}; run {self._jobs} by hand") from None
        return self._answer(JOB_TIMEOUT_S)

    def _answer(self, timeout_s: float) -> Any:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], timeout_s)[0]:
            raise PeerError(f"{self._name} was silent for {timeout_s:.0f} s; is the machine busy?")
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(f"{self._name} has ended; run {self._jobs} by hand to see why")
        return json.loads(line)
