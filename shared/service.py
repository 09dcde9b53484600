"""How every service starts and stops: arguments, log lines, signals, and the end of its parent."""

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from shared import tracing
from shared.config import Config, decode_config, load_config
from shared.errors import KvtideError
from shared.logs import set_up_logging
from shared.transport import use_keys

CONFIG_VARIABLE = "KVTIDE_CONFIG_JSON"  # set by a supervisor in place of --config
PARENT_VARIABLE = "KVTIDE_PARENT_FD"  # read end of a pipe that only the parent can write: its end is the parent's

Serve = Callable[[Config, str, asyncio.Event], Awaitable[None]]

log = logging.getLogger("kvtide.service")


def run_service(role: str, serve: Serve) -> int:
    """Run `serve(config, identity, stop)` until it returns; `stop` is set by SIGTERM, SIGINT or the parent's end.

    Returns the exit status: 0 after a stop, 1 after a KvtideError, whose text goes to the log.
    """
    parser = argparse.ArgumentParser(prog=f"python -m services.{role}")
    parser.add_argument("--config", type=Path, help="TOML file")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--identity", default=f"{role}-0", help="name of this process, kept over restarts")
    arguments = parser.parse_args()
    status = 0
    try:
        text = os.environ.get(CONFIG_VARIABLE)
        config = decode_config(text) if text else load_config(arguments.config, arguments.set)
        set_up_logging(config.run.log_level, arguments.identity, config.run.log_format)
        use_keys(config.run.keys_folder)
        tracing.start(config, role, arguments.identity)
        asyncio.run(_serve(config, arguments.identity, serve))
    except* KvtideError as group:
        print(f"{arguments.identity}: {group.exceptions[0]}", file=sys.stderr)
        status = 1
    finally:
        tracing.stop()
    return status


async def _serve(config: Config, identity: str, serve: Serve) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    descriptor = os.environ.get(PARENT_VARIABLE)
    if descriptor is not None:
        loop.add_reader(int(descriptor), _parent_ended, loop, int(descriptor), stop)
    log.info("started pid=%d", os.getpid())
    await serve(config, identity, stop)
    log.info("stopped")


def _parent_ended(loop: asyncio.AbstractEventLoop, descriptor: int, stop: asyncio.Event) -> None:
    if not os.read(descriptor, 1):
        loop.remove_reader(descriptor)
        log.warning("parent_ended")
        stop.set()
