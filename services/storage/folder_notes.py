"""What a page folder says of itself: an identity, and for each model which one it is. Read with aiofiles."""

import asyncio
import contextlib
import json
import os
import uuid
from pathlib import Path

import aiofiles
import aiofiles.os

from shared.errors import StorageError
from shared.geometry import PageGeometry

ID_FILE = "store.id"
MODEL_FILE = "model.json"


async def store_id(folder: Path) -> str:
    """Identity of the folder, equal for every instance that uses it. Raises OSError."""
    await _create(folder / ID_FILE, uuid.uuid4().hex)
    async with aiofiles.open(folder / ID_FILE, encoding="ascii") as file:
        return await file.read()


async def note_model(folder: Path, model_fingerprint: bytes, geometry: PageGeometry) -> None:
    """Write into a model's folder, which is there, for people, what its pages are.

    Raises StorageError when the folder is another model's, OSError when it can't be used.
    """
    note = {
        "model_fingerprint": model_fingerprint.hex(),
        "page_size": geometry.page_size,
        "layers": geometry.layers,
        "parts": [f"{part.name}: {part.heads} x {part.head_dim} {part.dtype}" for part in geometry.parts],
        "page_bytes": geometry.page_bytes,
    }
    await _create(folder / MODEL_FILE, json.dumps(note, indent=2) + "\n")
    async with aiofiles.open(folder / MODEL_FILE, encoding="utf-8") as file:
        text = await file.read()
    try:
        found = json.loads(text)["model_fingerprint"]
    except (ValueError, KeyError, TypeError):
        raise StorageError(f"{folder / MODEL_FILE} is damaged; remove this file, the pages may stay") from None
    if found != model_fingerprint.hex():
        raise StorageError(f"{folder} belongs to the model {found}, not {model_fingerprint.hex()}; use another folder")


async def _create(path: Path, text: str) -> None:
    """Write a file whole, unless there is one. After a power cut it is there whole, or not at all: a folder whose
    notes are empty can't be used."""
    if await aiofiles.os.path.exists(path):
        return
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    async with aiofiles.open(temporary, "x", encoding="utf-8") as file:
        await file.write(text)
        await file.flush()
        await asyncio.to_thread(os.fsync, file.fileno())
    with contextlib.suppress(FileExistsError):
        await aiofiles.os.link(temporary, path)  # unlike a rename it never replaces another instance's
    await aiofiles.os.unlink(temporary)
