"""`kvtide serve` as a user runs it: what it says, who may run it twice, and what is left when it ends."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from kvtide.run_folder import CHILDREN_NAME
from kvtide.stack import CHECKOUT
from shared.config import Config, encode_config
from tests.integration.harness import MAX_TOKENS, READY_TIMEOUT_S, small_config

GONE_S = 20.0  # children notice a dead parent at once and end within seconds
STOP_S = 30.0


class Served:
    """A running `kvtide serve`."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.config = config
        self.file = folder / "kvtide.toml"
        self.file.write_text(_toml(config))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvtide.cli", "serve", "--config", str(self.file)],
            cwd=CHECKOUT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []

    def wait_for(self, words: str) -> str:
        """Read what it says up to a line with these words."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if words in line:
                return line
        raise AssertionError(f"it ended without saying {words!r}: {''.join(self.lines)}")

    def children(self) -> dict[str, int]:
        """Process ids by identity."""
        recorded = json.loads((self.config.run_folder / CHILDREN_NAME).read_text())
        return {identity: pid for identity, (pid, _) in recorded.items()}

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Another command on the same configuration."""
        return subprocess.run(
            [sys.executable, "-m", "kvtide.cli", *arguments, "--config", str(self.file)],
            cwd=CHECKOUT,
            capture_output=True,
            text=True,
            timeout=READY_TIMEOUT_S,
        )


def _toml(config: Config) -> str:
    sections = json.loads(encode_config(config))
    lines = []
    for section, values in sections.items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    return "\n".join(lines)


@contextmanager
def serving(folder: Path) -> Iterator[Served]:
    """A `kvtide serve` that is ready."""
    served = Served(small_config(folder), folder)
    try:
        served.wait_for("ready after")
        yield served
    finally:
        served.process.kill()
        served.process.communicate()


def left_over(config: Config, pids: dict[str, int]) -> list[str]:
    """Processes, sockets, addresses and segments that should be gone."""
    segments = Path(config.storage.segment_folder).glob(f"kvtide.{config.run.name}.*")
    run = config.run_folder
    return [
        *(identity for identity, pid in pids.items() if _lives(pid)),
        *map(str, (*segments, *run.glob("*.sock"), *run.glob("gateway.json"))),
    ]


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def assert_nothing_is_left(config: Config, pids: dict[str, int]) -> None:
    """Within GONE_S."""
    deadline = time.monotonic() + GONE_S
    while left := left_over(config, pids):
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.1)


def test_serve_says_what_it_does_and_stops_cleanly(folder: Path) -> None:
    with serving(folder) as served:
        said = "".join(served.lines)
        for words in (
            "L1 device   on   768 tokens",
            "L2 host     on   4080 tokens",
            "L3 storage  on",
            "gateway-0 started",
        ):
            assert words in said
        url = json.loads((served.config.run_folder / "gateway.json").read_text())["url"]
        assert url in said
        assert f"curl {url}/v1/chat/completions" in served.wait_for("curl")
        body = {"model": served.config.model.name, "prompt": "The capital of France is", "max_tokens": MAX_TOKENS}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=READY_TIMEOUT_S, trust_env=False)
        assert answer.status_code == 200

        status = served.command("status", "--json")
        assert status.returncode == 0, status.stderr
        found = json.loads(status.stdout)
        assert found["ready"] is True
        assert found["integrity"] == "ok"
        table = served.command("status")
        assert "integrity ok" in table.stdout

        second = served.command("serve")
        assert second.returncode == 1
        assert f"process {served.process.pid}" in second.stderr
        assert second.stderr.count("\n") == 1

        pids = served.children()
        assert sorted(pids) == ["gateway-0", "gpu_worker-0", "scheduler-0", "storage-0"]
        served.process.send_signal(signal.SIGTERM)
        rest, _ = served.process.communicate(timeout=STOP_S)
        assert served.process.returncode == 0, rest
        assert "Traceback" not in rest
        assert left_over(served.config, pids) == []


def test_kill_9_of_the_parent_leaves_nothing_and_the_next_start_works(folder: Path) -> None:
    with serving(folder) as served:
        pids = served.children()
        served.process.kill()
        served.process.wait()
        assert_nothing_is_left(served.config, pids)


def test_what_was_killed_with_the_parent_is_cleaned_at_the_next_start(folder: Path) -> None:
    with serving(folder) as served:
        pids = served.children()
        for pid in pids.values():
            os.kill(pid, signal.SIGSTOP)  # none of them can clean up behind itself
        served.process.kill()
        served.process.wait()
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)
        assert left_over(served.config, {})
    with serving(folder) as served:
        new = served.children()
        assert not set(new.values()) & set(pids.values())
        segments = list(Path(served.config.storage.segment_folder).glob(f"kvtide.{served.config.run.name}.*"))
        assert len([path for path in segments if path.name.count(".") == 3]) == 1
        served.process.send_signal(signal.SIGINT)
        rest, _ = served.process.communicate(timeout=STOP_S)
        assert served.process.returncode == 130, rest
        assert left_over(served.config, new) == []


@pytest.mark.parametrize("arguments", [["bench"], ["serve", "--no-such-option"]])
def test_a_wrong_command_line_shows_the_usage(arguments: list[str]) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "kvtide.cli", *arguments], cwd=CHECKOUT, capture_output=True, text=True
    )
    assert found.returncode == 2
    assert "usage: kvtide" in found.stderr
