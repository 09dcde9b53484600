"""The proxies of the matrix in containers, in one of their own: `python -m tests.faults.links_service`.

One line "LINK FAULT SECONDS" on CONTROL_PORT has a fault carried out; the answer is a line of JSON,
{"pieces": how many the link got meanwhile} or {"error": why not}.
"""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

from tests.faults.matrix.cells import LINKS, PAGE_LINK
from tests.faults.matrix.links import disturb
from tests.faults.proxy import TcpProxy

CONTROL_PORT = 5710
PORTS = dict(zip(LINKS, range(5711, 5711 + len(LINKS)), strict=True))  # those of tests/compose/links.yaml
SCHEDULER, PAGES = "tcp://scheduler:5700", "tcp://storage:5701"
ANSWER_S = 30.0  # beyond the fault's own time


@asynccontextmanager
async def serving(proxies: Mapping[str, TcpProxy], host: str, port: int) -> AsyncIterator[int]:
    """Obey lines on host:port (0 = any free one), which is yielded."""

    async def obey(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answer = await _carry_out(proxies, (await reader.readline()).decode())
        writer.write(json.dumps(answer).encode() + b"\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(obey, host, port) as server:
        yield server.sockets[0].getsockname()[1]


async def _carry_out(proxies: Mapping[str, TcpProxy], line: str) -> dict[str, int | str]:
    try:
        link, fault, seconds = line.split()
        return {"pieces": await disturb(proxies[link], link, fault, float(seconds))}
    except (ValueError, KeyError) as error:
        return {"error": f"{line!r} is not LINK FAULT SECONDS with a link of {', '.join(proxies)}: {error!r}"}


async def order(host: str, port: int, link: str, fault: str, seconds: float) -> int:
    """The other end: have a fault carried out. Returns the pieces; raises ValueError with the answer's error."""
    async with asyncio.timeout(seconds + ANSWER_S):
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(f"{link} {fault} {seconds}\n".encode())
            answer = json.loads(await reader.readline())
        finally:
            writer.close()
    if "error" in answer:
        raise ValueError(answer["error"])
    return int(answer["pieces"])


async def main() -> None:
    """Until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    proxies = {
        link: TcpProxy(PAGES if link == PAGE_LINK else SCHEDULER, "0.0.0.0", port) for link, port in PORTS.items()
    }
    async with AsyncExitStack() as entered:
        for proxy in proxies.values():
            await entered.enter_async_context(proxy)
        await entered.enter_async_context(serving(proxies, "0.0.0.0", CONTROL_PORT))
        await stop.wait()


if __name__ == "__main__":
    asyncio.run(main())
