"""Compiled code is used for exactly the sources that it was made of."""

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from kvtide import compile as compiler
from shared import compiled

SHOW = "import services.scheduler.core.core as core; print(core.__file__)"


def _file_of_the_core(value: str) -> Path:
    environment = {**os.environ, compiled.VARIABLE: value}
    command = [sys.executable, "-c", SHOW]
    done = subprocess.run(
        command, cwd=compiled.ROOT, env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    return Path(done.stdout.strip())


def test_plain_python_on_request() -> None:
    assert _file_of_the_core("0") == compiled.ROOT / "services" / "scheduler" / "core" / "core.py"


def test_compiled_where_it_was_made() -> None:
    folder = compiled.compiled_folder()
    if not folder.is_dir():
        pytest.skip(f"{folder} is missing: python -m kvtide.compile")
    assert _file_of_the_core("1") == folder / "services" / "scheduler" / "core" / f"core{compiled.SUFFIX}"


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of two modules and a package's head."""
    for module in ("core/tree.py", "core/__init__.py", "other/world.py"):
        (tmp_path / module).parent.mkdir(exist_ok=True)
        (tmp_path / module).write_text("x = 1\n")
    monkeypatch.setattr(compiled, "ROOT", tmp_path)
    monkeypatch.setattr(compiled, "PACKAGES", ("core", "other"))
    return tmp_path


def test_a_changed_added_or_renamed_source_has_no_code(checkout: Path) -> None:
    assert compiled.sources() == [Path("core/tree.py"), Path("other/world.py")]
    seen = [compiled.compiled_folder()]
    for change in (
        lambda: (checkout / "core/tree.py").write_text("x = 2\n"),
        lambda: (checkout / "core/node.py").write_text("x = 1\n"),
        lambda: (checkout / "core/node.py").rename(checkout / "core/leaf.py"),
    ):
        change()
        seen.append(compiled.compiled_folder())
    assert len(set(seen)) == len(seen)
    (checkout / "shared").mkdir()
    (checkout / "shared/messages.py").write_text("x = 1\n")  # compiled code checks the types that it declares
    seen.append(compiled.compiled_folder())
    assert seen[-1] != seen[-2]
    (checkout / "core/__init__.py").write_text("# not compiled\n")
    assert compiled.compiled_folder() == seen[-1]


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compiler, "compiled_folder", lambda: tmp_path / "none")
    monkeypatch.setattr(compiler, "find_compiler", lambda: None)
    assert compiler.build() == (False, "no C compiler (looked for $CC, cc, gcc, clang)")


def test_a_source_that_mypyc_refuses_leaves_no_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compiler, "compiled_folder", lambda: tmp_path / "core-1")
    monkeypatch.setattr(compiler, "BUILD_FOLDER", tmp_path)
    monkeypatch.setattr(compiler, "ROOT", tmp_path)  # where there is no kvtide.compile to run
    built, message = compiler.build()
    assert not built
    assert message.startswith("mypyc failed with 1: ")
    assert list(tmp_path.iterdir()) == []


@contextmanager
def _compiling(folder: Path) -> Iterator[None]:
    """Another process that compiles into this folder, as far as one can see."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def test_a_second_one_waits_for_the_first_and_finds_it_done(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compiler, "compiled_folder", lambda: tmp_path / "core-1")
    monkeypatch.setattr(compiler, "BUILD_FOLDER", tmp_path)
    monkeypatch.setattr(compiler, "_compile", lambda *_: pytest.fail("compiled twice"))
    said: list[str] = []
    with ExitStack() as first:
        first.enter_context(_compiling(tmp_path))

        def finish_the_first(line: str) -> None:
            said.append(line)
            (tmp_path / "core-1").mkdir()
            first.close()

        assert compiler.build(finish_the_first) == (True, "")
    assert said == ["waiting: another process compiles the core"]


def test_a_first_one_that_hangs_is_waited_for_in_vain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compiler, "compiled_folder", lambda: tmp_path / "core-1")
    monkeypatch.setattr(compiler, "BUILD_FOLDER", tmp_path)
    monkeypatch.setattr(compiler, "TIMEOUT_S", 0.0)
    with _compiling(tmp_path):
        built, message = compiler.build()
    assert not built
    assert message.startswith(f"another process has held {tmp_path}")
