"""L3 in files that live as long as the service: a folder for each run of each storage, cleared at its start."""

import asyncio
import fcntl
import os
import shutil
from pathlib import Path

from services.storage.hash_file import HashFileBackend
from services.storage.page_batch import DEFAULT, Policy
from shared.errors import StorageError
from shared.messages.storage import BackendInfo

LOCK_FILE = "run.lock"  # held while a service uses the folder, so that a second one of its name doesn't clear it


class FileBackend(HashFileBackend):
    """`hash_file` in a folder of its own, with nothing in it at the start and gone at the end."""

    def __init__(
        self, folder: Path, quota_bytes: int, free_floor_bytes: int, io_threads: int, *, policy: Policy = DEFAULT
    ) -> None:
        super().__init__(folder / "pages", quota_bytes, free_floor_bytes, io_threads, policy=policy)
        self._run_folder = folder
        self._lock: int | None = None

    async def start(self) -> None:
        """Raises StorageError when the folder can't be made or cleared, or is another service's."""
        try:
            await asyncio.to_thread(self._clear_folder)
        except BlockingIOError:
            raise StorageError(
                f"{self._run_folder} is in use by another service; give this stack another run.name"
            ) from None
        except OSError as error:
            raise StorageError(
                f"can't clear the page folder {self._run_folder}: {error.strerror}; see storage.folder"
            ) from None
        await super().start()

    @property
    def info(self) -> BackendInfo:
        shared = super().info
        return BackendInfo(f"file:{self._id}", "file", shared=False, persistent=False, capacity=shared.capacity)

    async def close(self) -> None:
        await super().close()
        if self._lock is not None:
            await asyncio.to_thread(shutil.rmtree, self._run_folder, ignore_errors=True)
            os.close(self._lock)
            self._lock = None

    def _clear_folder(self) -> None:
        self._run_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(self._run_folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            self._lock = None
            raise
        if self.folder.exists():
            shutil.rmtree(self.folder)
