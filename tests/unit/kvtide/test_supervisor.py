"""The supervisor over fake children: back-off, order, giving up, and what a killed one leaves."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import kvtide.child as child_module
from kvtide.child import Command, StackError
from kvtide.run_folder import CHILDREN_NAME, claimed, end_orphans, record_children
from kvtide.stack import CHECKOUT
from kvtide.supervisor import Supervisor
from tests.unit.kvtide import fake_stack
from tests.unit.kvtide.fake_stack import command, notes, wait_for_notes

GONE_S = 10.0


class Reports(list[str]):
    """What a supervisor said."""

    def supervisor(self, *commands: Command, order: tuple[str, ...] | None = None) -> Supervisor:
        return Supervisor(commands, order or tuple(each.identity for each in commands), self.append, lambda pids: None)


async def test_a_child_that_dies_is_started_again_with_a_growing_delay(tmp_path: Path) -> None:
    reports = Reports()
    async with reports.supervisor(command(tmp_path, "one")) as supervisor:
        for starts in (1, 2, 3):
            found = await asyncio.to_thread(wait_for_notes, tmp_path, "start", starts)
            if starts < 3:
                supervisor.send("one", signal.SIGKILL)
    times = [at for _, _, at in found]
    assert times[1] - times[0] >= child_module.FIRST_DELAY_S
    assert times[2] - times[1] >= 2 * child_module.FIRST_DELAY_S
    assert len({pid for _, pid, _ in found}) == 3
    assert [line for line in reports if "SIGKILL" in line and "starting it again in 0.2 s" in line]
    assert [line for line in reports if "SIGKILL" in line and "starting it again in 0.4 s" in line]


async def test_the_delay_starts_over_after_a_healthy_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_module, "HEALTHY_S", 0.0)
    reports = Reports()
    async with reports.supervisor(command(tmp_path, "one")) as supervisor:
        for starts in (1, 2, 3):
            await asyncio.to_thread(wait_for_notes, tmp_path, "start", starts)
            supervisor.send("one", signal.SIGKILL)
    delays = [line for line in reports if "starting it again" in line]
    assert delays
    assert all("in 0.2 s" in line for line in delays)


async def test_children_stop_in_the_given_order_one_after_the_other(tmp_path: Path) -> None:
    names = ("one", "two", "three")
    reports = Reports()
    async with reports.supervisor(*(command(tmp_path, name) for name in names), order=("two", "three", "one")) as it:
        await asyncio.to_thread(wait_for_notes, tmp_path, "start", 3)
        assert sorted(it.pids) == sorted(names)
    assert [name for name, _, _ in notes(tmp_path, "stop")] == ["two", "three", "one"]
    assert it.pids == {}


async def test_a_child_that_ignores_sigterm_is_killed_after_its_grace(tmp_path: Path) -> None:
    reports = Reports()
    async with reports.supervisor(command(tmp_path, "one", "deaf", grace_s=0.1)):
        ((_, pid, _),) = await asyncio.to_thread(wait_for_notes, tmp_path, "start", 1)
    assert not psutil.pid_exists(pid)
    assert any("did not stop within 0.1 s: killed" in line for line in reports)


async def test_a_second_cancel_ends_the_grace(tmp_path: Path) -> None:
    reports = Reports()

    async def run() -> None:
        async with reports.supervisor(command(tmp_path, "one", "deaf", grace_s=60.0)) as supervisor:
            await supervisor.watch()

    task = asyncio.create_task(run())
    ((_, pid, _),) = await asyncio.to_thread(wait_for_notes, tmp_path, "start", 1)
    task.cancel()
    await asyncio.sleep(0)  # it is in its stop now
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, GONE_S)
    assert not psutil.pid_exists(pid)


async def test_a_child_that_can_not_start_is_given_up_with_its_last_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_module, "FIRST_DELAY_S", 0.01)
    reports = Reports()
    with pytest.raises(StackError, match="bad failed 5 times in a row") as caught:
        async with reports.supervisor(command(tmp_path, "good"), command(tmp_path, "bad", "fail")) as supervisor:
            await supervisor.watch()
    assert "bad has nothing to serve" in str(caught.value)
    starts = [name for name, _, _ in notes(tmp_path, "start")]
    assert starts.count("bad") == child_module.QUICK_FAILURES
    assert [name for name, _, _ in notes(tmp_path, "stop")] == ["good"]


async def test_an_unknown_child_is_named_with_those_that_exist(tmp_path: Path) -> None:
    async with Reports().supervisor(command(tmp_path, "one")) as supervisor:
        with pytest.raises(StackError, match="no child is called 'two'; there are one"):
            supervisor.send("two", signal.SIGTERM)


def lives(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def _killable(folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", fake_stack.__name__, str(folder)], cwd=CHECKOUT)


def test_children_end_when_their_supervisor_is_killed(tmp_path: Path) -> None:
    with _killable(tmp_path) as supervisor:
        started = wait_for_notes(tmp_path, "start", 2)
        supervisor.kill()
    assert len(wait_for_notes(tmp_path, "orphan", 2)) == 2
    assert end_orphans(tmp_path) == []
    assert not [pid for _, pid, _ in started if lives(pid)]


def test_a_second_supervisor_is_refused_and_told_who_is_first(tmp_path: Path) -> None:
    with _killable(tmp_path) as supervisor:
        wait_for_notes(tmp_path, "start", 2)
        with pytest.raises(StackError, match=rf"process {supervisor.pid}; stop it \(kill {supervisor.pid}\)"):
            with claimed(tmp_path):
                pass
        supervisor.kill()
    wait_for_notes(tmp_path, "orphan", 2)
    with claimed(tmp_path):
        assert end_orphans(tmp_path) == []


def test_an_orphan_that_hangs_is_killed_at_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtide.run_folder.ORPHAN_GRACE_S", 0.1)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as hung:
        record_children(tmp_path, {"gpu_worker-0": hung.pid})
        assert end_orphans(tmp_path) == ["gpu_worker-0"]
    assert not (tmp_path / CHILDREN_NAME).exists()


def test_another_process_with_a_recorded_pid_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / CHILDREN_NAME).write_text(f'{{"storage-0": [{os.getpid()}, 12.5]}}')
    assert end_orphans(tmp_path) == []
