"""A node of a Mooncake Store: lends memory to the pool. `python -m services.storage.mooncake_node --master HOST:PORT`

Mooncake has a program of its own for that, with an HTTP side that needs more packages; this one does nothing else.
"""

import argparse
import importlib
import signal
import sys
import time

from services.storage.backend import StoreLostError
from services.storage.mooncake_store import ADDRESS, BUFFER_BYTES, OK, own_address

RETRY_S = 0.5
START_S = 60.0  # for the master, which may start at the same time


def main() -> int:
    """Lend until SIGTERM. Returns 1 when the master doesn't come."""
    parser = argparse.ArgumentParser(prog="python -m services.storage.mooncake_node", description="Lend memory.")
    parser.add_argument("--master", default=ADDRESS, metavar="HOST:PORT", help="(default %(default)s)")
    parser.add_argument("--bytes", type=int, default=2**30, help="memory to lend (default %(default)s)")
    options = parser.parse_args()
    store = importlib.import_module("mooncake.store").MooncakeDistributedStore()
    stopped = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, stopped)
    deadline = time.monotonic() + START_S
    while not _joined(store, options.master, options.bytes):
        if time.monotonic() > deadline:
            print(f"no Mooncake master at {options.master} within {START_S:g} s", file=sys.stderr)
            return 1
        time.sleep(RETRY_S)
    print(f"node_ready master={options.master} bytes={options.bytes}", flush=True)
    signal.sigwait(stopped)
    store.close()
    return 0


def _joined(store: object, master: str, size: int) -> bool:
    try:
        address = own_address(master)
    except StoreLostError:
        return False
    code: int = store.setup(address, "P2PHANDSHAKE", size, BUFFER_BYTES, "tcp", "", master)  # type: ignore[attr-defined]
    return code == OK


if __name__ == "__main__":
    sys.exit(main())
