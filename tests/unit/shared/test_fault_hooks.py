"""The points where fault tests interfere."""

import os
import signal
import time
from pathlib import Path

import pytest

from shared import test_hooks
from shared.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(test_hooks, "folder", tmp_path)
    return tmp_path


def test_without_a_folder_nothing_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_hooks, "folder", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "worker_load").write_text("skip")
    assert test_hooks.reach("worker_load") == ""
    assert (tmp_path / "worker_load").exists()


def test_a_point_acts_once(folder: Path) -> None:
    (folder / "worker_skip_layer").write_text("skip\n")
    assert test_hooks.reach("worker_load") == ""
    assert test_hooks.reach("worker_skip_layer") == "skip"
    assert test_hooks.reach("worker_skip_layer") == ""


def test_sleep_takes_seconds(folder: Path) -> None:
    (folder / "worker_step").write_text("sleep 0.05")
    started = time.monotonic()
    assert test_hooks.reach("worker_step") == ""
    assert time.monotonic() - started >= 0.05


@pytest.mark.parametrize(("text", "number"), [("stop", signal.SIGSTOP), ("kill", signal.SIGKILL)])
def test_signals_go_to_this_process(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, number: int) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, signal_number: sent.append((pid, signal_number)))
    (folder / "worker_write").write_text(text)
    test_hooks.reach("worker_write")
    assert sent == [(os.getpid(), number)]


def test_another_text_is_refused(folder: Path) -> None:
    (folder / "worker_write").write_text("explode")
    with pytest.raises(ConfigError, match="explode"):
        test_hooks.reach("worker_write")
