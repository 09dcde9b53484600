"""`kvtide doctor`: each check says ok, warns or fails with a remedy, and the exit status follows."""

import fcntl
import json
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec.structs import replace
from rich.console import Console

from kvtide import cli, doctor_machine, doctor_stack
from kvtide.doctor import CHECKS, as_json, diagnose, print_verdicts, worst
from kvtide.doctor_verdict import GIB, MIB, Verdict, size
from kvtide.run_folder import claimed, record_children
from shared.compiled import SUFFIX, VARIABLE
from shared.config import Cache, Config, Gateway, Run, Storage, Worker

DISK = shutil._ntuple_diskusage  # what shutil.disk_usage returns


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A stack that nothing is wrong with: its own folders, a small host pool, any port."""
    (tmp_path / "segments").mkdir()
    return Config(
        run=Run(name="doctored", folder=str(tmp_path / "run")),
        cache=Cache(host_bytes=MIB),
        worker=Worker(threads=1),
        storage=Storage(
            folder=str(tmp_path / "l3"), segment_folder=str(tmp_path / "segments"), quota_bytes=MIB, free_floor_bytes=0
        ),
        gateway=Gateway(port=0),
    )


def only(check: Iterator[Verdict]) -> Verdict:
    (verdict,) = check
    return verdict


def test_every_verdict_but_ok_has_a_remedy(config: Config) -> None:
    verdicts = diagnose(config)
    assert {verdict.what for verdict in verdicts} >= {
        "model", "memory", "host pool", "disk", "port", "earlier runs", "cores", "compiler", "page copy", "checksum",
        "core",
    }  # fmt: skip
    for verdict in verdicts:
        assert bool(verdict.remedy) == (verdict.state != "ok"), verdict
    assert json.loads(as_json(verdicts))["state"] == worst(verdicts)


def test_a_check_that_can_t_find_out_warns(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(config: Config) -> Iterator[Verdict]:
        raise PermissionError("no")
        yield

    monkeypatch.setattr("kvtide.doctor.CHECKS", (broken,))
    assert diagnose(config) == [Verdict("warn", "broken", "can't find out: no", diagnose(config)[0].remedy)]
    assert len(CHECKS) == 11


def test_the_text_has_a_line_a_remedy_and_an_end() -> None:
    console = Console(width=80)
    with console.capture() as captured:
        print_verdicts([Verdict("ok", "port", "free"), Verdict("fail", "memory", "1 GiB " * 30, "buy some")], console)
    lines = captured.get().splitlines()
    assert lines[0] == "ok   port    free"
    assert lines[1].startswith("fail memory  1 GiB")
    assert lines[2].strip() == "-> buy some"
    assert "can't run" in lines[3]


@pytest.mark.parametrize(("count", "text"), [(0, "0 MiB"), (5 * MIB, "5 MiB"), (3 * GIB // 2, "1.5 GiB")])
def test_sizes(count: int, text: str) -> None:
    assert size(count) == text


# --- the machine ---


@contextmanager
def machine_memory(monkeypatch: pytest.MonkeyPatch, available: int, cgroup: Path) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": available}))
        patch.setattr(doctor_machine, "CGROUP", cgroup)
        patch.setattr(doctor_machine, "OWN_CGROUP", cgroup / "own")
        yield


def write_group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_memory_is_what_the_container_leaves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with machine_memory(monkeypatch, 100 * GIB, tmp_path):
        assert doctor_machine.free_memory() == (100 * GIB, False)
        (tmp_path / "own").write_text("0::/box/inner\n")
        write_group(tmp_path / "box", memory__max=str(8 * GIB), memory__current=str(6 * GIB))
        write_group(tmp_path / "box", memory__stat=f"anon 1\ninactive_file {GIB}\n")
        write_group(tmp_path / "box" / "inner", memory__max="max\n", memory__current="1", memory__stat="")
        assert doctor_machine.free_memory() == (3 * GIB, True)


def test_memory_under_the_first_kind_of_groups(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_group(tmp_path / "memory", memory__limit_in_bytes=str(2 * GIB), memory__usage_in_bytes=str(GIB))
    write_group(tmp_path / "memory", memory__stat="total_inactive_file 0\n")
    with machine_memory(monkeypatch, 100 * GIB, tmp_path):
        assert doctor_machine.free_memory() == (GIB, True)


@pytest.mark.parametrize(("free", "state"), [(4 * GIB, "ok"), (2 * GIB, "warn"), (GIB, "fail")])
def test_memory_fails_when_the_pools_can_t_fit(
    config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: int, state: str
) -> None:
    config = replace(config, cache=replace(config.cache, host_bytes=3 * GIB // 2))
    with machine_memory(monkeypatch, free, tmp_path):
        verdict = only(doctor_machine.memory(config))
    assert verdict.state == state
    assert "1.5 GiB L2" in verdict.text


def test_the_host_pool_s_folder(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_machine, "file_system", lambda path: "tmpfs")
    assert only(doctor_machine.segment_room(config)).state == "ok"
    too_big = replace(config, cache=replace(config.cache, host_bytes=2**60))
    assert only(doctor_machine.segment_room(too_big)).state == "fail"
    off = replace(config, cache=replace(config.cache, host_bytes=0))
    assert "off" in only(doctor_machine.segment_room(off)).text
    gone = replace(config, storage=replace(config.storage, segment_folder="/nowhere"))
    assert "/nowhere is missing" in only(doctor_machine.segment_room(gone)).text
    monkeypatch.setattr(doctor_machine, "file_system", lambda path: "ext4")
    assert only(doctor_machine.segment_room(config)).state == "warn"


def test_file_systems_are_told_apart() -> None:
    assert doctor_machine.file_system(Path("/proc/self")) == "proc"


def test_the_disk_counts_what_is_stored_already(
    config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: DISK(GIB, 0, 0))
    assert "keep nothing" in only(doctor_machine.disk(config)).text
    folder = tmp_path / "l3" / "ab"
    folder.mkdir(parents=True)
    (folder / "page").write_bytes(os.urandom(MIB))
    assert only(doctor_machine.disk(config)).state == "ok"
    floor = replace(config, storage=replace(config.storage, free_floor_bytes=MIB // 2))
    assert "of its quota" in only(doctor_machine.disk(floor)).text
    none = replace(config, storage=replace(config.storage, backend="memory"))
    assert only(doctor_machine.disk(none)).state == "ok"


def test_threads_against_cores(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    for share, threads, state in (
        (None, 0, "ok"),
        (4.0, 4, "ok"),
        (4.0, 0, "warn"),
        (None, 9, "warn"),
        (1.0, 1, "warn"),
    ):
        monkeypatch.setattr(doctor_machine, "cpu_share", lambda share=share: share)
        found = only(doctor_machine.cores(replace(config, worker=Worker(threads=threads))))
        assert found.state == state, found


def test_a_container_s_share_of_the_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with machine_memory(monkeypatch, GIB, tmp_path):
        assert doctor_machine.cpu_share() is None
        write_group(tmp_path, cpu__max="150000 100000\n")
        assert doctor_machine.cpu_share() == 1.5
        write_group(tmp_path, cpu__max="max 100000\n")
        assert doctor_machine.cpu_share() is None


def test_compiler_and_kernels(config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor_machine, "find_compiler", lambda: None)
    monkeypatch.setattr(doctor_machine, "library_path", lambda: tmp_path / "none.so")
    assert only(doctor_machine.compiler(config)).state == "warn"
    monkeypatch.setattr(doctor_machine, "library_path", lambda: tmp_path)
    assert only(doctor_machine.compiler(config)).state == "ok"
    monkeypatch.setattr(doctor_machine.page_copy, "which", lambda: "C (crc instruction)")
    monkeypatch.setattr(doctor_machine.checksum, "which", lambda: "google-crc32c c (C: not built)")
    assert [each.state for each in doctor_machine.kernels(config)] == ["ok", "warn"]


@pytest.mark.parametrize(
    ("file", "wanted", "state"),
    [(f"core{SUFFIX}", "1", "ok"), ("core.py", "1", "warn"), ("core.py", "0", "warn")],
)
def test_the_core_is_compiled_or_not(
    config: Config, monkeypatch: pytest.MonkeyPatch, file: str, wanted: str, state: str
) -> None:
    monkeypatch.setattr(doctor_machine.scheduler_core, "__file__", file)
    monkeypatch.setenv(VARIABLE, wanted)
    verdict = only(doctor_machine.core(config))
    assert verdict.state == state
    assert ("kvtide.compile" in verdict.remedy) == (verdict.state == "warn" and wanted == "1")


# --- the stack ---


def test_a_folder_that_is_no_model_is_named(config: Config, tmp_path: Path) -> None:
    verdict = only(doctor_stack.model(replace(config, model=replace(config.model, path=str(tmp_path)))))
    assert verdict.state == "fail"
    assert str(tmp_path) in verdict.text


def test_the_default_model(config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVTIDE_CACHE", str(tmp_path / "cache"))
    assert doctor_stack.with_made_model(config) == config
    assert "at the first start" in only(doctor_stack.model(config)).text
    monkeypatch.setattr("kvtide.default_model.source.PACKAGE", "no-such-package")
    missing = only(doctor_stack.model(config))
    assert (missing.state, "make setup" in missing.remedy) == ("fail", True)


def test_a_port_that_is_taken(config: Config) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        number = server.getsockname()[1]
        taken = only(doctor_stack.port(replace(config, gateway=Gateway(port=number))))
    assert (taken.state, str(number) in taken.text) == ("fail", True)
    free = only(doctor_stack.port(replace(config, gateway=Gateway(port=number))))
    assert free.state == "ok"


def test_damaged_files_are_counted(config: Config, tmp_path: Path) -> None:
    assert list(doctor_stack.stored(config)) == []
    (tmp_path / "l3" / "quarantine").mkdir(parents=True)
    (tmp_path / "l3" / "quarantine" / "page").touch()
    assert only(doctor_stack.stored(config)).state == "warn"


def test_a_stack_that_runs_is_no_leftover(config: Config) -> None:
    assert only(doctor_stack.leftovers(config)).state == "ok"
    with claimed(config.run_folder):
        verdict = only(doctor_stack.leftovers(config))
    assert (verdict.state, f"process {os.getpid()}" in verdict.text) == ("ok", True)
    assert only(doctor_stack.leftovers(config)).state == "ok"


def test_processes_and_segments_left_behind(config: Config, tmp_path: Path) -> None:
    with claimed(config.run_folder):
        record_children(config.run_folder, {"storage-0": os.getpid(), "gateway-0": 2**22 + 1})
    dead = tmp_path / "segments" / "kvtide.doctored.storage-0.17"
    dead.write_bytes(bytes(MIB))
    held = tmp_path / "segments" / "kvtide.other.storage-0.18"
    with held.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        orphans, segments = doctor_stack.leftovers(config)
    assert f"storage-0 (pid {os.getpid()})" in orphans.text
    assert "gateway-0" not in orphans.text
    assert segments.text == "1 segments of dead processes hold 1 MiB of memory"
    assert segments.remedy == "kvtide serve removes them"


# --- the command ---


@pytest.mark.parametrize(("overrides", "status"), [([], 0), (["cache.host_bytes=9000000000000000"], cli.FAILED)])
def test_the_command_s_status(
    overrides: list[str], status: int, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    keys = [f"run.folder={tmp_path}", f"storage.folder={tmp_path}", "cache.host_bytes=1000000", "gateway.port=0"]
    arguments: list[Any] = [part for key in [*keys, *overrides] for part in ("--set", key)]
    assert cli.main(["doctor", "--json", *arguments]) == status
    found = json.loads(capsys.readouterr().out)
    assert (found["state"] == "fail") == bool(status)
