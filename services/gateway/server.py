"""The service: it listens at once, lets requests wait for the scheduler, and drains them at the end."""

import asyncio
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import uvicorn
from starlette.types import ASGIApp

from services.gateway.app import build_app
from services.gateway.errors import unavailable
from services.gateway.limits import DRAIN_S, FLUSH_S
from services.gateway.metrics import GatewayMetrics
from services.gateway.model import Model
from services.gateway.records import Records
from services.gateway.scheduler_client import SchedulerClient
from shared.config import Config
from shared.errors import ConfigError

ADDRESS_FILE = "gateway.json"  # in the run folder: {"url": ...} while the gateway listens
BACKLOG = 2048  # connections not yet accepted: as many as there may be open requests

STOPPING = unavailable("the gateway is stopping: send the request again")

log = logging.getLogger("kvtide.gateway")


async def serve(config: Config, identity: str, stop: asyncio.Event) -> None:
    """Run the gateway until `stop`. Raises ModelError, ConfigError or ProtocolError, each saying what to do."""
    model = Model(config)
    metrics = GatewayMetrics()
    records = Records(metrics)
    listener = _listen_again(config) or _listen(config.gateway.host, config.gateway.port)
    client = SchedulerClient(config.scheduler_endpoint, identity, config.scheduler.request_timeout_s)
    server = _Server(build_app(model, client, records, metrics, config.gateway.api_keys, config.gateway.admin_keys))
    linked = asyncio.create_task(client.run())
    serving = asyncio.create_task(server.serve([listener]))
    stopping = asyncio.create_task(stop.wait())
    try:
        with _address_file(config.run_folder, _url(config.gateway.host, listener)) as url:
            log.info("listening url=%s model=%s context=%d", url, model.name, model.context)
            await asyncio.wait((linked, serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        # 1. No new connections; 2. open requests finish; 3. those that don't end with an error; 4. the link goes last.
        server.should_exit = True
        if linked.done() or not client.link.up:
            client.fail_all(STOPPING)
        await asyncio.wait((serving,), timeout=DRAIN_S)  # it ends with the last request, which may have come just now
        if not serving.done():
            log.warning("drain_timeout open=%d", records.open)
            client.fail_all(STOPPING)
        await serving
    finally:
        for task in (stopping, serving, linked):
            task.cancel()
        await asyncio.gather(stopping, serving, linked, return_exceptions=True)
        listener.close()
    if not linked.cancelled() and (error := linked.exception()):
        raise error


class _Server(uvicorn.Server):
    def __init__(self, app: ASGIApp) -> None:
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_graceful_shutdown=int(DRAIN_S + FLUSH_S),
        )
        super().__init__(config)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to `shared.service`."""
        yield


def _listen_again(config: Config) -> socket.socket | None:
    """With any free port wanted: the port of a gateway that was killed here, so that its clients find this one."""
    if config.gateway.port:
        return None
    try:
        left = msgspec.json.decode((config.run_folder / ADDRESS_FILE).read_bytes(), type=dict[str, str])
        return _listen(config.gateway.host, int(left["url"].rpartition(":")[2]))
    except (OSError, KeyError, ValueError, ConfigError):
        return None  # a clean start, or the port is another's now


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"can't listen on {host}:{port}: {error.strerror}; stop what uses the port, or set gateway.port to another "
            "one (0 = any free port)"
        ) from None
    listener.setblocking(False)
    return listener


def _url(host: str, listener: socket.socket) -> str:
    """Where a client on this machine finds the gateway."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    port = listener.getsockname()[1]
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


@contextmanager
def _address_file(folder: Path, url: str) -> Iterator[str]:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    file = folder / ADDRESS_FILE
    making = folder / f".{ADDRESS_FILE}.new"
    making.write_bytes(msgspec.json.encode({"url": url}))
    making.replace(file)
    try:
        yield url
    finally:
        file.unlink(missing_ok=True)
