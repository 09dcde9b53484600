"""A stack with a proxy in each link between two services."""

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from msgspec.structs import replace

from shared.config import Config
from tests.faults.matrix.cells import LINKS, PAGE_LINK
from tests.faults.proxy import TcpProxy

OfRole = Callable[[str, Config], Config]


@asynccontextmanager
async def proxied(config: Config, remote: bool) -> AsyncIterator[tuple[Config, OfRole, dict[str, TcpProxy]]]:
    """The configuration and `of_role` for `running_stack`, and the proxies by link.

    remote: the worker gets its host pages over a link, too; else it maps them, and that link isn't there.
    """
    scheduler, pages = (f"tcp://127.0.0.1:{_free_port()}" for _ in range(2))
    links = [link for link in LINKS if remote or link != PAGE_LINK]
    proxies = {link: TcpProxy(pages if link == PAGE_LINK else scheduler) for link in links}

    def of_role(role: str, config: Config) -> Config:
        proxy = proxies.get(f"{role}-scheduler")
        return replace(config, run=replace(config.run, scheduler_endpoint=proxy.endpoint)) if proxy else config

    async with AsyncExitStack() as entered:
        for proxy in proxies.values():
            await entered.enter_async_context(proxy)
        config = replace(config, run=replace(config.run, scheduler_endpoint=scheduler))
        if remote:
            storage = replace(config.storage, pages_endpoint=pages, pages_advertise=proxies[PAGE_LINK].endpoint)
            config = replace(config, storage=storage, worker=replace(config.worker, host_path="remote"))
        yield config, of_role, proxies


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
