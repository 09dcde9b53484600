"""storage.fsync: what is on the disk before a page counts as stored, and the notes of a folder at any rate."""

import os
from pathlib import Path

import pytest

from services.storage.folder_notes import ID_FILE, MODEL_FILE
from services.storage.hash_file import HashFileBackend
from services.storage.page_batch import Policy
from tests.unit.storage.pages import GEOMETRY, MODEL, page_files, put

pytestmark = pytest.mark.usefixtures("version")


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Inodes of what Python has written to the disk."""
    found, fsync = set(), os.fsync

    def noted(file: int) -> None:
        fsync(file)
        found.add(os.fstat(file).st_ino)

    monkeypatch.setattr(os, "fsync", noted)
    return found


@pytest.mark.parametrize("fsync", [True, False])
async def test_with_fsync_the_folders_above_a_page_have_their_names_on_the_disk(
    tmp_path: Path, synced: set[int], fsync: bool
) -> None:
    store = HashFileBackend(tmp_path / "new" / "l3", 2**30, 0, 2, policy=Policy(fsync=fsync))
    await store.start()
    pages = await store.of_model(MODEL, GEOMETRY)
    for folder in (tmp_path, store.folder.parent, store.folder):
        assert (folder.stat().st_ino in synced) == fsync, folder
    synced.clear()
    assert await put(pages, 0) == [True]
    await store.close()
    [page] = page_files(store.folder)
    assert (page.parents[1].stat().st_ino in synced) == fsync


async def test_the_notes_of_a_folder_are_whole_on_the_disk(tmp_path: Path, synced: set[int]) -> None:
    """A folder whose notes are empty after a power cut would be refused."""
    store = HashFileBackend(tmp_path / "l3", 2**30, 0, 2)
    await store.start()
    await store.of_model(MODEL, GEOMETRY)
    await store.close()
    for name in (ID_FILE, f"{MODEL.hex()[:16]}/{MODEL_FILE}"):
        assert (store.folder / name).stat().st_ino in synced, name
