"""What the suite needs of each kind besides the contract: a store underneath that can be damaged, lost and stalled.

A rig owns what outlives a backend: a folder, a process. It makes any number of backends on it.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ClassVar
from unittest import mock

from kernels import native
from services.storage.backends import make_backend
from services.storage.breaker import BreakerBackend
from services.storage.hash_file import HashFileBackend
from services.storage.key_value import key_of
from services.storage.page_file import PageFormat
from services.storage.sealed import HEADER_BLOCK, SealedBackend
from services.storage.test_hooks import FAIL_READ, FAIL_WRITE, SLOW_READ, VARIABLE
from shared.config import load_config
from tests.backends.guide import write_guide_module
from tests.unit.storage.pages import FILE_BYTES, GEOMETRY, MODEL, Page

STORAGE = "storage-0"
VALUE_BYTES = PageFormat(MODEL, GEOMETRY, HEADER_BLOCK).file_bytes
FULL = os.environ.get("KVTIDE_BACKENDS") == "full"  # `make test-backends`: every kind, all pages
STALL_S = 30.0  # longer than any deadline here

Change = Callable[[bytes], bytes]


class Rig:
    """One kind of backend."""

    kind: ClassVar[str]
    page_bytes = VALUE_BYTES  # what a page takes of the quota
    timeout_s = 2.0  # of a call; a healthy store on an idle machine answers in a hundredth of it
    quota_is_its_own = True  # storage.quota_bytes bounds it
    survives = True  # its pages outlive the loss of the store
    damaged = 1000 if FULL else 100  # pages that are flipped or cut
    many = 10_000 if FULL else 1000  # keys at once
    knows_sizes = False  # it reads as many bytes as asked for: a short value is its miss, a longer one is cut

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._made: list[BreakerBackend] = []

    async def open(self) -> None:
        """Bring up what the store needs."""

    async def close(self) -> None:
        """Close every backend that was made."""
        for backend in self._made:
            await backend.close()

    def overrides(self, quota: int) -> list[str]:
        """The kind's own configuration."""
        return [f"storage.backend={self.kind}", f"storage.quota_bytes={quota}"]

    async def make(self, quota_pages: int = 20_000, identity: str = STORAGE) -> BreakerBackend:
        """A started backend."""
        backend = make_backend(
            load_config(
                overrides=[
                    f"storage.folder={self.folder / 'l3'}",
                    "storage.free_floor_bytes=0",
                    f"storage.timeout_s={self.timeout_s}",
                    *self.overrides(quota_pages * self.page_bytes),
                ]
            ),
            identity,
        )
        assert isinstance(backend, BreakerBackend)
        self._made.append(backend)
        await backend.start()
        return backend

    async def damage(self, backend: BreakerBackend, n: int, change: Change, model: bytes = MODEL) -> None:
        """Change what the store has under page `n`."""
        assert isinstance(backend.inner, SealedBackend)
        store, key = backend.inner.store, key_of(model, Page(n).digest)
        [value] = await store.get([key], VALUE_BYTES)
        assert value is not None
        changed = bytearray(change(bytes(value)))
        assert await store.remove([key]) == 1
        assert await store.set([key], [changed]) == [True]

    async def value(self, backend: BreakerBackend, n: int, model: bytes = MODEL) -> bytes:
        """What the store has under page `n`, header and all."""
        found: list[bytes] = []
        await self.damage(backend, n, lambda data: found.append(data) or data, model)  # type: ignore[func-returns-value]
        return found[0]

    @asynccontextmanager
    async def lost(self, backend: BreakerBackend) -> AsyncIterator[None]:
        """The store fails inside the block."""
        assert isinstance(backend.inner, SealedBackend)
        with _each_call_of(backend.inner, mock.AsyncMock(side_effect=ConnectionResetError("on request"))):
            yield

    @asynccontextmanager
    async def stalled(self, backend: BreakerBackend) -> AsyncIterator[None]:
        """The store doesn't answer inside the block."""
        assert isinstance(backend.inner, SealedBackend)
        with _each_call_of(backend.inner, mock.AsyncMock(side_effect=_hang)):
            yield


async def _hang(*_: object) -> None:
    await asyncio.sleep(STALL_S)


def _each_call_of(backend: SealedBackend, call: mock.AsyncMock) -> "mock._patch_dict":
    return mock.patch.multiple(backend.store, start=call, exists=call, get=call, set=call, remove=call)  # type: ignore[return-value]


class MemoryRig(Rig):
    kind = "memory"


class GuideRig(Rig):
    """The guide's own code."""

    kind = "guide"

    def overrides(self, quota: int) -> list[str]:
        path = write_guide_module(self.folder)
        options = f'{{path = "{self.folder / "pages.db"}", capacity = {quota}}}'
        return ["storage.backend=dynamic", f"storage.dynamic_class={path}", f"storage.options={options}"]


class HiCacheRig(Rig):
    """A class written to SGLang's interface."""

    kind = "hicache"
    knows_sizes = True
    quota_is_its_own = False

    def overrides(self, quota: int) -> list[str]:
        return [
            "storage.backend=dynamic",
            "storage.dynamic_class=tests.backends.hicache_example:FolderStorage",
            f'storage.options={{folder = "{self.folder / "pages"}"}}',
        ]

    async def damage(self, backend: BreakerBackend, n: int, change: Change, model: bytes = MODEL) -> None:
        [path] = (self.folder / "pages").glob(f"{key_of(model, Page(n).digest)}*")
        path.write_bytes(change(path.read_bytes()))


class HashFileRig(Rig):
    kind = "hash_file"
    damaged = 1000
    page_bytes = FILE_BYTES

    async def damage(self, backend: BreakerBackend, n: int, change: Change, model: bytes = MODEL) -> None:
        assert isinstance(backend.inner, HashFileBackend)
        digest = Page(n).digest.hex()
        path = backend.inner.folder / model.hex()[:16] / digest[:2] / f"{digest}.page"
        path.write_bytes(change(path.read_bytes()))

    @asynccontextmanager
    async def lost(self, backend: BreakerBackend) -> AsyncIterator[None]:
        hooks = [self.folder / name for name in (FAIL_READ, FAIL_WRITE)]
        for hook in hooks:
            hook.write_text("EIO")
        with mock.patch.dict(os.environ, {VARIABLE: str(self.folder)}):
            yield
        for hook in hooks:
            hook.unlink()

    @asynccontextmanager
    async def stalled(self, backend: BreakerBackend) -> AsyncIterator[None]:
        (self.folder / SLOW_READ).write_text(str(4 * self.timeout_s))
        with mock.patch.dict(os.environ, {VARIABLE: str(self.folder)}):
            yield


class PlainHashFileRig(HashFileRig):
    """`hash_file` without the C extension."""

    damaged = Rig.damaged

    async def open(self) -> None:
        self._without = mock.patch.object(native, "load", return_value=(None, "turned off by a test"))
        self._without.start()

    async def close(self) -> None:
        await super().close()
        self._without.stop()


class FileRig(HashFileRig):
    kind = "file"
    damaged = Rig.damaged
