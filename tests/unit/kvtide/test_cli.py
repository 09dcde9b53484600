"""The command line: one line for an error, a status for a shell, no heavy import before it is needed."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvtide import cli
from kvtide.stack import CHECKOUT


def test_a_bad_override_is_one_line_that_names_the_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "--set", "cache.page_sise=32"]) == cli.FAILED
    error = capsys.readouterr().err
    assert error.startswith("kvtide: unknown key cache.page_sise; the keys of [cache] are page_size")
    assert error.count("\n") == 1


def test_a_missing_file_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["serve", "--config", str(tmp_path / "none.toml")]) == cli.FAILED
    assert f"can't read the configuration {tmp_path}/none.toml" in capsys.readouterr().err


def test_status_without_a_stack_says_what_to_do(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["status", "--json", "--set", f"run.folder={tmp_path}"]) == cli.FAILED
    captured = capsys.readouterr()
    assert f"no scheduler answers at ipc://{tmp_path}/scheduler.sock" in captured.err
    assert "kvtide serve" in captured.err
    assert captured.out == ""


def test_a_run_folder_too_long_for_a_socket_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--set", f"run.folder=/tmp/{'x' * 100}", "--set", "model.path=/none"]) == cli.FAILED
    assert "too long for a socket's path" in capsys.readouterr().err


def test_ctrl_c_ends_with_130_and_no_traceback() -> None:
    hold = "import asyncio, sys\nfrom kvtide import cli, status\n"
    hold += "async def hang(endpoint):\n    print('asking', flush=True)\n    await asyncio.sleep(60)\n"
    hold += "status.fetch_status = hang\nsys.exit(cli.main(['status']))\n"
    with subprocess.Popen(
        [sys.executable, "-c", hold], cwd=CHECKOUT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "asking\n"
        os.kill(process.pid, signal.SIGINT)
        _, error = process.communicate(timeout=20)
    assert process.returncode == cli.INTERRUPTED
    assert error == ""


def test_the_command_line_is_light_until_a_command_needs_more() -> None:
    code = "import sys, json; import kvtide.cli, kvtide.status; print(json.dumps(sorted(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "openai", "uvicorn"} & set(json.loads(found.stdout))


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["bench", "soak", "--help"]])
def test_help_says_what_a_command_does(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(arguments)
    assert "usage: kvtide" in capsys.readouterr().out
