"""`kvtide record`: live traffic as a trace that `kvtide replay` reads. Sizes, times and salted hashes; no text."""

import asyncio
import gzip
import json
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from kvtide.child import StackError
from kvtide.guest import ANSWER_TIMEOUT_S, Guest
from shared.errors import ProtocolError, TraceError
from shared.messages.gateway import Recorded, RecordWanted

SALT_BYTES = 32  # drawn for each recording and kept nowhere: its ids tell nothing about a text, and fit no other trace


class _Recording(Guest):
    """Asks to be told of others' requests."""

    def __init__(self, endpoint: str, write: Callable[[str], object]) -> None:
        super().__init__(endpoint)
        self._salt = secrets.token_bytes(SALT_BYTES)
        self._write = write
        self._started_ms = time.time_ns() // 1_000_000
        self.requests = 0
        self.greeted = asyncio.Event()

    def on_scheduler(self, epoch: int) -> None:
        self.link.send(RecordWanted(self._salt))
        self.greeted.set()

    def on_message(self, message: Any) -> None:
        if isinstance(message, Recorded):
            self.requests += 1
            line = {
                "timestamp": max(0, message.arrived_ms - self._started_ms),
                "input_length": message.input_tokens,
                "output_length": message.output_tokens,
                "block_size": message.page_size,
                "hash_ids": message.ids,
            }
            self._write(json.dumps(line) + "\n")


async def record(endpoint: str, path: Path, seconds: float | None, say: Callable[[str], None]) -> int:
    """Write each request that comes and ends to `path` until `seconds` are over or the task is cancelled; returns
    their number.

    Raises TraceError when the file is there already or can't be written, StackError when no scheduler answers.
    """
    with _open(path) as file:
        recording = _Recording(endpoint, file.write)
        try:
            async with recording as link:
                greeted = asyncio.create_task(recording.greeted.wait())
                await asyncio.wait([greeted, link], timeout=ANSWER_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
                greeted.cancel()
                if link.done():
                    link.result()
                if not recording.greeted.is_set():
                    _discard(path)
                    raise StackError(
                        f"no scheduler answers at {endpoint} within {ANSWER_TIMEOUT_S:g} s; is the stack running?"
                    )
                say(f"recording to {path}; Ctrl-C ends it")
                await asyncio.wait([link], timeout=seconds)
                if link.done():
                    link.result()
        except ProtocolError as error:
            raise StackError(f"the scheduler at {endpoint} refuses to say: {error}") from None
        finally:
            if recording.greeted.is_set():
                say(f"{recording.requests} requests in {path}")
    return recording.requests


def _open(path: Path) -> IO[str]:
    try:
        if path.suffix == ".gz":
            return gzip.open(path, "xt", encoding="utf-8")
        return path.open("x", encoding="utf-8", buffering=1)
    except FileExistsError:
        raise TraceError(f"{path} is there already; choose another name") from None
    except OSError as error:
        raise TraceError(f"{path} can't be written: {error}") from error


def _discard(path: Path) -> None:
    """Remove the file of a recording that hasn't begun."""
    path.unlink(missing_ok=True)
