"""Client of an LMCache server that has our module: `lmcache_server` starts one.

LMCache keeps the values in its memory and its files, evicts, and shares them among clients. It has no checksum and
acknowledges a value before it is on disk; ours are sealed, so a lost or damaged one is a miss.

On the wire: a DEALER sends [id, operation, arguments], each msgpack, and gets [id, operation, result] or nothing.
"""

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from services.storage.backend import StoreLostError
from services.storage.key_value import KeyValueStore

ADDRESS = "127.0.0.1:5703"  # where `python -m services.storage.lmcache_server` listens
OPERATION = "server_module_call"
METHODS = ("info", "exists", "get", "put", "remove", "clear")  # of the module; each as kvtide.METHOD

encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode


class _Call(msgspec.Struct):
    method: str
    payload: bytes


class _Answer(msgspec.Struct):
    success: bool
    payload: memoryview
    error: str


class LmcacheStore(KeyValueStore):
    """Belongs to the event loop that starts it. A call ends with its caller's deadline; a late answer is dropped."""

    shared = True
    persistent = True  # when the server has files; what it hadn't written yet is lost with it

    def __init__(self, address: str = ADDRESS) -> None:
        self._address = address
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._reader: asyncio.Task[None] | None = None
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[bytes | memoryview]] = {}
        self._sizes: dict[str, int] = {}  # of each model's values: LMCache wants to know before it looks for them
        self._server_bytes = 0.0
        self._bad_answers = 0

    @property
    def store_id(self) -> str:
        return self._address

    async def start(self) -> None:
        if self._socket is None:
            self._socket = self._context.socket(zmq.DEALER)
            self._socket.linger = 0
            self._socket.immediate = True  # a dead server gets no queue of pages that it would have to work off
            self._socket.connect(f"tcp://{self._address}")
            self._reader = asyncio.create_task(self._read())
        _, used, _ = await self._call("info", [])
        self._server_bytes = used

    def expect(self, model: str, size: int) -> None:
        self._sizes[model] = size

    async def exists(self, keys: Sequence[str]) -> int:
        return int(await self._call("exists", [self._size_of(keys), keys]))

    async def get(self, keys: Sequence[str], size: int) -> list[memoryview | None]:
        return await self._call("get", [size, keys], list[memoryview | None])

    async def set(self, keys: Sequence[str], values: Sequence[bytearray]) -> list[bool]:
        return await self._call("put", list(zip(keys, values, strict=True)), list[bool])

    async def remove(self, keys: Sequence[str]) -> int:
        return int(await self._call("remove", [self._size_of(keys), keys]))

    async def clear(self) -> None:
        await self._call("clear", [])

    def stats(self) -> dict[str, float]:
        return {"l3_server_bytes": self._server_bytes, "l3_bad_answers": self._bad_answers}

    async def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait([self._reader])
        if self._socket is not None:
            self._socket.close()
        self._context.term()

    def _size_of(self, keys: Sequence[str]) -> int:
        model, _, _ = keys[0].partition("-")  # the keys of a call are one model's
        return self._sizes[model]

    async def _call(self, method: str, arguments: Any, kind: Any = Any) -> Any:
        assert self._socket is not None
        number = next(self._ids)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        call = _Call(f"kvtide.{method}", encode(arguments))
        try:
            await self._socket.send_multipart([encode(number), encode(OPERATION), encode(call)], copy=False)
            reply = decode(await answer, type=_Answer)
        finally:
            del self._waiting[number]
        if not reply.success:
            raise StoreLostError(f"the LMCache server {self._address} failed in {method}: {reply.error}")
        return decode(reply.payload, type=kind)

    async def _read(self) -> None:
        assert self._socket is not None
        while True:
            frames = await self._socket.recv_multipart(copy=False)
            try:
                number = decode(frames[0].buffer, type=int)
            except msgspec.MsgspecError:
                number = 0
            answer = self._waiting.get(number)
            if len(frames) != 3:
                self._bad_answers += 1
            elif answer is not None and not answer.done():
                answer.set_result(frames[2].buffer)
