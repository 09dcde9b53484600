"""A TCP proxy between two services whose link a test makes slow, silent, dishonest or broken.

    async with TcpProxy("tcp://127.0.0.1:5700") as proxy:
        config = ...scheduler_endpoint = proxy.endpoint
        proxy.delay_s = 0.2

Each setting works at once, on open connections too. What a proxy does it does to both directions.
"""

import asyncio
import contextlib
import random
from types import TracebackType
from typing import Self

CHUNK = 64 * 1024  # bytes read at once


class TcpProxy:
    """Stands before one TCP endpoint of ZeroMQ or HTTP."""

    def __init__(self, target: str, host: str = "127.0.0.1", port: int = 0) -> None:
        """target: "tcp://HOST:PORT" or "http://HOST:PORT". host, port: where it listens; 0 = any free port."""
        self._listens_at = host, port
        self.delay_s = 0.0  # that each chunk waits
        self.rate = 0.0  # bytes/s of each direction; 0 = as fast as it goes
        self.corrupt_every = 0  # flips a bit in every n-th chunk, somewhere; 0 = in none
        self.refuse = False  # closes new connections at once
        self.blackhole = False  # reads bytes and passes none on: to both ends the link looks alive
        self.passed = bytearray()  # what went through, for a test that looks at the wire; see `record`
        self.record = False
        self.connections = 0  # so far
        self._scheme, _, address = target.partition("://")
        self._host, _, target_port = address.rpartition(":")
        self._port = int(target_port)
        self._flowing = asyncio.Event()
        self._flowing.set()
        self.chunks = 0  # read so far
        self._chance = random.Random(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    @property
    def endpoint(self) -> str:
        """What to connect to in place of the target."""
        assert self._server is not None, "enter the proxy first"
        return f"{self._scheme}://{self._listens_at[0]}:{self._server.sockets[0].getsockname()[1]}"

    def stall(self) -> None:
        """Pass nothing on, and read nothing, until `resume`: the senders' buffers fill."""
        self._flowing.clear()

    def resume(self) -> None:
        """End a stall."""
        self._flowing.set()

    def reset(self) -> None:
        """Break every open connection, with a TCP reset and not a good-bye."""
        for writer in self._open:
            writer.transport.abort()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, *self._listens_at)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._open.add(writer)
        self.connections += 1
        try:
            if not self.refuse:
                await self._relay(reader, writer)
        except OSError:
            pass  # the target isn't there, or an end has gone: the other end sees the connection close
        finally:
            await self._close(writer)
            self._tasks.discard(task)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        self._open.add(far_writer)
        ways = [
            asyncio.create_task(self._pump(reader, far_writer)),
            asyncio.create_task(self._pump(far_reader, writer)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            await self._close(far_writer)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(CHUNK):
            self.chunks += 1
            await self._flowing.wait()
            await asyncio.sleep(self.delay_s + (len(chunk) / self.rate if self.rate else 0.0))
            if self.blackhole:
                continue
            if self.corrupt_every and self.chunks % self.corrupt_every == 0:
                at = self._chance.randrange(len(chunk))
                chunk = chunk[:at] + bytes([chunk[at] ^ 1 << self._chance.randrange(8)]) + chunk[at + 1 :]
            if self.record:
                self.passed += chunk
            writer.write(chunk)
            await writer.drain()

    async def _close(self, writer: asyncio.StreamWriter) -> None:
        self._open.discard(writer)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
