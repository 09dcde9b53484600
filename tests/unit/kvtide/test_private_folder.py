"""Private folders vanish with their command, or with the next one."""

import os
import tempfile
from pathlib import Path

import pytest

from kvtide.private_folder import LOCK_NAME, NEW_S, private_folder


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_folder_is_removed_at_the_end(temporary: Path) -> None:
    with private_folder("kvtide-x-") as folder:
        (folder / "l3").mkdir()
        (folder / "l3" / "page").write_bytes(b"x")
    assert list(temporary.iterdir()) == []


def test_what_a_killed_command_left_goes_and_what_lives_stays(temporary: Path) -> None:
    left = temporary / "kvtide-x-left"
    left.mkdir()
    (left / LOCK_NAME).touch()
    unrelated = temporary / "kvtide-y-1"
    unrelated.mkdir()
    with private_folder("kvtide-x-") as first, private_folder("kvtide-x-") as second:
        assert first.exists()
        assert second.exists()
        assert not left.exists()
    assert list(temporary.iterdir()) == [unrelated]


def test_a_folder_that_is_just_being_made_stays(temporary: Path) -> None:
    new, old = temporary / "kvtide-x-new", temporary / "kvtide-x-old"
    new.mkdir()
    old.mkdir()
    os.utime(old, times=(0.0, old.stat().st_mtime - 2 * NEW_S))
    with private_folder("kvtide-x-"):
        assert new.exists()
        assert not old.exists()
