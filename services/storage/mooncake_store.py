"""Client of a Mooncake Store: a master that knows where values are, and nodes that lend their memory to the pool.

The client lends nothing unless told so: pages then survive its end. A restart of the master loses them all. Values move
straight between the nodes and memory that this process has registered with Mooncake, over TCP or RDMA.

Mooncake's data port listens on every interface and no option changes that: run it where only friends can reach it.
"""

import asyncio
import ctypes
import importlib
import mmap
import os
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from services.storage.backend import StoreLostError
from services.storage.key_value import KeyValueStore, Value
from services.storage.sealed import CALL_BYTES
from shared.errors import StorageError

ADDRESS = "127.0.0.1:50151"  # of the master
INSTALL = "pip install --no-deps -r requirements-mooncake.txt; apt-get install libcurl4 libibverbs1"
OURS = "^[0-9a-f]{64}-[0-9a-f]{64}$"  # every key of `key_of`
PROBE = "kvtide"  # a key that isn't there
BUFFER_BYTES = 16 * 2**20  # of Mooncake's own, for calls that aren't used here; its default
TIMEOUTS_MS = {
    "MC_RPC_TIMEOUT_MS": 1000,
    "MC_RPC_CONNECT_TIMEOUT_MS": 500,
}  # unset, a dead master holds a thread for 4 s

OK, NO_SPACE, TOO_SHORT, NOT_FOUND, RPC_FAILED = 0, -200, -600, -704, -900

T = TypeVar("T")


def own_address(master: str) -> str:
    """The IPv4 address from which this machine reaches a master. Raises StoreLostError when it has none."""
    host, _, port = master.rpartition(":")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
            way.connect((host, int(port)))  # sends nothing
            return str(way.getsockname()[0])
    except OSError as error:
        raise StoreLostError(f"no way to the Mooncake master at {master}: {error}") from None


class MooncakeStore(KeyValueStore):
    """Its calls block, so they run in threads, and each thread has its own registered memory."""

    shared = True

    def __init__(
        self,
        address: str,
        threads: int,
        hostname: str = "",
        protocol: str = "tcp",
        rdma_devices: str = "",
        segment_bytes: int = 0,
    ) -> None:
        """`hostname` is this process's, as the nodes reach it, "" = its address on the way to the master;
        `segment_bytes` is the memory that it lends.

        Raises StorageError when Mooncake isn't installed.
        """
        for name, milliseconds in TIMEOUTS_MS.items():
            os.environ.setdefault(name, str(milliseconds))
        try:
            self._client: Any = importlib.import_module("mooncake.store").MooncakeDistributedStore()
        except ImportError as error:
            raise StorageError(f"storage.backend is mooncake and {error}; {INSTALL}") from None
        self._hostname = hostname
        self._setup = ("P2PHANDSHAKE", segment_bytes, BUFFER_BYTES, protocol, rdma_devices, address)
        self._address = address
        self._threads = ThreadPoolExecutor(threads, "l3-mooncake")
        self._lock = threading.Lock()
        self._ready = False
        self._own = threading.local()

    @property
    def store_id(self) -> str:
        return self._address

    async def start(self) -> None:
        await self._in_thread(self._connect)

    async def exists(self, keys: Sequence[str]) -> int:
        found = self._answered(await self._in_thread(lambda: self._client.batch_is_exist(list(keys))))
        return next((hits for hits, each in enumerate(found) if each != 1), len(keys))

    async def get(self, keys: Sequence[str], size: int) -> list[Value | None]:
        return await self._in_thread(lambda: self._get(list(keys), size))

    async def set(self, keys: Sequence[str], values: Sequence[bytearray]) -> list[bool]:
        return await self._in_thread(lambda: self._set(list(keys), values))

    async def remove(self, keys: Sequence[str]) -> int:
        """By force: a page that was just read has a lease, and a damaged one must not wait for its end."""
        codes = self._answered(await self._in_thread(lambda: self._client.batch_remove(list(keys), True)))
        return codes.count(OK)

    async def clear(self) -> None:
        await self._in_thread(lambda: self._client.remove_by_regex(OURS, True))

    async def close(self) -> None:
        self._threads.submit(self._client.close)  # it waits for the master, which may be gone
        self._threads.shutdown(wait=False)

    def _connect(self) -> None:
        with self._lock:
            if not self._ready:
                code = self._client.setup(self._hostname or own_address(self._address), *self._setup)
                if code:
                    raise StoreLostError(f"no Mooncake master at {self._address}: setup answered {code}")
                self._ready = True
        self._answered(self._client.batch_is_exist([PROBE]))

    def _get(self, keys: list[str], size: int) -> list[Value | None]:
        memory = self._memory(size * len(keys))
        codes = self._answered(self._client.batch_get_into(keys, memory.slots(size, len(keys)), [size] * len(keys)))
        return [memory.copy(n * size, code) if code >= 0 else _value_of(code) for n, code in enumerate(codes)]

    def _set(self, keys: list[str], values: Sequence[bytearray]) -> list[bool]:
        size = max(map(len, values))
        memory = self._memory(size * len(keys))
        for position, value in enumerate(values):
            memory.fill(position * size, value)
        slots = memory.slots(size, len(keys))
        codes = self._answered(self._client.batch_put_from(keys, slots, [len(value) for value in values]))
        return [code == OK for code in codes]

    def _memory(self, size: int) -> "_Registered":
        """This thread's memory, of at least `size` bytes."""
        memory: _Registered | None = getattr(self._own, "memory", None)
        if memory is None or memory.size < size:
            if memory is not None:
                memory.close(self._client)
            memory = self._own.memory = _Registered(self._client, max(size, CALL_BYTES))
        return memory

    def _answered(self, codes: list[int]) -> list[int]:
        """The codes of a call. Raises StoreLostError when the master didn't answer it."""
        if RPC_FAILED in codes or (codes and set(codes) == {-1}):
            raise StoreLostError(f"the Mooncake master {self._address} doesn't answer")
        return codes

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


class _Registered:
    """Memory that Mooncake reads and writes."""

    def __init__(self, client: Any, size: int) -> None:
        self.size = size
        self._map = mmap.mmap(-1, size)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        code = client.register_buffer(self._address, size)
        if code:
            raise StoreLostError(f"Mooncake can't register {size} bytes: it answered {code}")

    def slots(self, size: int, count: int) -> list[int]:
        """Addresses of consecutive pieces."""
        return [self._address + n * size for n in range(count)]

    def fill(self, start: int, value: bytearray) -> None:
        """Put a value in."""
        self._map[start : start + len(value)] = value

    def copy(self, start: int, size: int) -> bytes:
        """Take a value out."""
        return self._map[start : start + size]

    def close(self, client: Any) -> None:
        """Give it back to the system."""
        client.unregister_buffer(self._address)


def _value_of(code: int) -> Value | None:
    """A value that is longer than asked for is a wrong one; any other error is a miss."""
    return b"" if code == TOO_SHORT else None
