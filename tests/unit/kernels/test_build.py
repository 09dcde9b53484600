"""The extension builds into its own folder, once, and its absence is explained."""

import stat
from pathlib import Path

import pytest

from kernels import build, native


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(build, "BUILD_FOLDER", tmp_path / "_build")
    return tmp_path / "_build"


def test_builds_once_and_leaves_one_file(folder: Path) -> None:
    if build.find_compiler() is None:
        pytest.skip("no C compiler here")
    assert build.build()[0]
    assert [path.suffix for path in folder.iterdir()] == [".so"]
    assert "up to date" in build.build()[1]


def test_no_compiler_is_said_and_not_raised(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    assert build.main() == 1
    assert "no C compiler" in capsys.readouterr().err
    assert not folder.exists()


def test_a_failing_compiler_leaves_nothing_behind(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "badcc"
    compiler.write_text("#!/bin/sh\necho it broke >&2\nexit 3\n")
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CC", str(compiler))
    built, message = build.build()
    assert not built
    assert "failed with 3: it broke" in message
    assert list(folder.iterdir()) == []


def test_a_missing_or_damaged_library_is_not_used(folder: Path) -> None:
    fresh_load = native.load.__wrapped__
    missing = folder / "none.so"
    damaged = folder / "bad.so"
    folder.mkdir()
    damaged.write_bytes(b"not a library")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "library_path", lambda: missing)
        assert fresh_load() == (None, "not built; run `python -m kernels.build`")
        patch.setattr(native, "library_path", lambda: damaged)
        library, reason = fresh_load()
    assert library is None
    assert "does not load" in reason
