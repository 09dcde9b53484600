"""storage.key_file: pages that somebody without the key has written are never served, and counted."""

import logging
from pathlib import Path

import pytest

from kernels import native
from kernels.checksum import crc32c
from services.storage import page_file
from services.storage.backend import Backend
from services.storage.backends import make_backend
from services.storage.hash_file import HashFileBackend
from services.storage.memory_store import MemoryStore
from services.storage.page_batch import DONE, PageBatch, Policy
from services.storage.page_file import CHECK, FIXED, PageFormat
from services.storage.page_key import LEAST_BYTES, PROOF_BYTES, read_key
from services.storage.sealed import SealedBackend
from shared.config import load_config
from shared.errors import StorageError
from tests.unit.storage.pages import GEOMETRY, MODEL, Page, exists, hits, page_files, put

KEY, OTHER = b"k" * 32, b"o" * 32
PAGES = range(10)


def backends(kind: str, folder: Path, *keys: bytes) -> list[Backend]:
    """Two instances, or more, that share a store; each has its key."""
    if kind == "hash_file":
        return [HashFileBackend(folder, 2**30, 0, 2, key=key) for key in keys]
    store = MemoryStore(2**30)
    return [SealedBackend("memory", store, 5.0, 2, key=key) for key in keys]


@pytest.mark.parametrize("kind", ["hash_file", "memory"])
@pytest.mark.parametrize("written_with", [b"", OTHER], ids=["none", "other"])
async def test_pages_of_another_key_or_of_none_are_counted_and_not_served(
    tmp_path: Path, kind: str, written_with: bytes
) -> None:
    theirs, ours = backends(kind, tmp_path / "l3", written_with, KEY)
    await theirs.start()
    assert all(await put(await theirs.of_model(MODEL, GEOMETRY), *PAGES))
    await ours.start()
    pages = await ours.of_model(MODEL, GEOMETRY)
    assert await exists(pages, *PAGES) == len(PAGES)
    assert await hits(pages, *PAGES) == [False] * len(PAGES)
    assert ours.stats()["l3_corrupt"] == len(PAGES)
    assert all(await put(pages, *PAGES)), "and what was refused makes room for ours"
    assert await hits(pages, *PAGES) == [True] * len(PAGES)
    await theirs.close()
    await ours.close()


async def test_a_page_that_was_changed_with_all_its_checksums_is_refused(tmp_path: Path) -> None:
    (store,) = backends("hash_file", tmp_path / "l3", KEY)
    await store.start()
    pages = await store.of_model(MODEL, GEOMETRY)
    await put(pages, 1)
    [path] = page_files(tmp_path / "l3")
    written, layout, wrong = path.read_bytes(), PageFormat(MODEL, GEOMETRY), Page(2)
    proof_at = FIXED.size + 4 * GEOMETRY.units
    head = bytearray(layout.header(Page(1).digest, wrong.checksums, memoryview(wrong.bytes)))
    head[proof_at : proof_at + PROOF_BYTES] = written[proof_at : proof_at + PROOF_BYTES]
    head[-CHECK.size :] = CHECK.pack(crc32c(bytes(head[: -CHECK.size])))
    path.write_bytes(head + wrong.bytes)
    layout.verify(memoryview(wrong.bytes), layout.checksums_in(bytes(head), Page(1).digest))  # it passes without a key
    assert await hits(pages, 1) == [False]
    assert store.stats()["l3_corrupt"] == 1
    await store.close()


@pytest.mark.usefixtures("version")
async def test_a_page_is_sealed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often its slice is interrupted: a proof takes as long as the page does."""
    sealed, proof = [], page_file.proof
    monkeypatch.setattr(page_file, "proof", lambda *each: sealed.append(each) or proof(*each))
    (store,) = backends("hash_file", tmp_path / "l3", KEY)
    await store.start()
    assert all(await put(await store.of_model(MODEL, GEOMETRY), *PAGES))
    assert len(sealed) == len(PAGES)
    await store.close()


@pytest.mark.usefixtures("version")
def test_a_batch_that_is_stopped_while_it_reads_has_no_page_whose_key_was_not_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, path = Page(0), tmp_path / "one.page"
    theirs, ours = (PageFormat(MODEL, GEOMETRY, key=key) for key in (OTHER, KEY))
    name, buffer = ([str(path)], [page.digest]), memoryview(bytearray(page.bytes))
    writing = PageBatch(theirs, *name, [buffer], Policy(), [page.checksums], [f"{path}.tmp"])
    writing.write(0, 1)
    assert list(writing.outcomes) == [DONE]
    batch, move = PageBatch(ours, *name, [buffer], Policy()), native.Native.move_pages

    def stopped_meanwhile(*arguments: object, **how: bool) -> int:
        end = move(*arguments, **how)
        batch.stop()
        return end

    monkeypatch.setattr(native.Native, "move_pages", stopped_meanwhile)
    batch.read(0, 1)
    assert batch.outcomes[0] != DONE
    assert batch.checksums() == [None]


def test_a_key_is_read_from_a_file_that_is_long_enough_and_private(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "key"
    with pytest.raises(StorageError, match="No such file"):
        read_key(path)
    path.write_bytes(b"k" * (LEAST_BYTES - 1))
    with pytest.raises(StorageError, match="15 bytes, 16 are the least"):
        read_key(path)
    path.write_bytes(b"k" * LEAST_BYTES)
    path.chmod(0o644)
    with caplog.at_level(logging.WARNING, "kvtide.storage"):
        first = read_key(path)
    assert "chmod 600" in caplog.text
    path.write_bytes(b"l" * LEAST_BYTES)
    assert read_key(path) != first


@pytest.mark.parametrize("backend", ["hash_file", "file", "memory", "lmcache"])
def test_every_backend_takes_the_key_of_the_configuration(tmp_path: Path, backend: str) -> None:
    settings = [f"storage.backend={backend}", f"storage.folder={tmp_path}", f"storage.key_file={tmp_path / 'key'}"]
    with pytest.raises(StorageError, match=r"storage\.key_file"):
        make_backend(load_config(None, settings), "storage-0")
