"""The proxies of the matrix in containers obey their control port."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.faults.links_service import order, serving
from tests.faults.matrix.cells import LINK_FAULTS
from tests.faults.matrix.links import CORRUPT_EVERY
from tests.faults.proxy import TcpProxy

HOST = "127.0.0.1"
LINK = "gpu_worker-scheduler"
PATIENCE_S = 10.0
FAULT_S = 0.05
PIECE = b"piece"


@asynccontextmanager
async def echo() -> AsyncIterator[int]:
    """A service that says what it hears; yields its port."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while heard := await reader.read(1024):
            writer.write(heard)
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, HOST, 0) as server:
        yield server.sockets[0].getsockname()[1]


@asynccontextmanager
async def link() -> AsyncIterator[tuple[TcpProxy, int]]:
    """A proxy before an echo, and its control port."""
    async with echo() as target, TcpProxy(f"tcp://{HOST}:{target}") as proxy, serving({LINK: proxy}, HOST, 0) as port:
        yield proxy, port


@asynccontextmanager
async def connected(proxy: TcpProxy) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """One connection through a proxy."""
    reader, writer = await asyncio.open_connection(HOST, int(proxy.endpoint.rpartition(":")[2]))
    yield reader, writer
    writer.close()


async def test_a_fault_acts_for_its_time_and_its_pieces_are_counted() -> None:
    async with asyncio.timeout(PATIENCE_S), link() as (proxy, port), connected(proxy) as (reader, writer):
        under_way = asyncio.create_task(order(HOST, port, LINK, "corrupt", 1.0))
        while not proxy.corrupt_every:  # noqa: ASYNC110 - the other end of a socket sets it
            await asyncio.sleep(0.001)
        heard = b""
        for _ in range(CORRUPT_EVERY):
            writer.write(PIECE)
            heard += await reader.readexactly(len(PIECE))
        assert heard != PIECE * CORRUPT_EVERY
        assert await under_way == 2 * CORRUPT_EVERY  # each went there and back
        writer.write(PIECE)
        assert await reader.readexactly(len(PIECE)) == PIECE


@pytest.mark.parametrize("fault", LINK_FAULTS)
async def test_every_fault_of_the_matrix_is_known_and_over_at_the_end(fault: str) -> None:
    async with asyncio.timeout(PATIENCE_S), link() as (proxy, port):
        assert await order(HOST, port, LINK, fault, FAULT_S) == 0
        async with connected(proxy) as (reader, writer):
            writer.write(PIECE)
            assert await reader.readexactly(len(PIECE)) == PIECE


@pytest.mark.parametrize("line", [("no-link", "delay"), (LINK, "boredom"), (LINK, "two words")])
async def test_what_can_not_be_done_is_said(line: tuple[str, str]) -> None:
    async with asyncio.timeout(PATIENCE_S), link() as (_, port):
        with pytest.raises(ValueError, match="LINK FAULT SECONDS"):
            await order(HOST, port, *line, FAULT_S)
