"""Starts the LMCache server that `storage.backend = "lmcache"` speaks to, in the environment that has LMCache.

LMCache has no authentication and unpickles what its own clients send: it belongs on 127.0.0.1 or a private network.
"""

import argparse
import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
PORT = 5703  # what `storage.address` defaults to
GIB = 2**30
WORKERS = 2  # calls at once; the copies are bound by memory, not by cores
DISK_WORKERS = 2  # threads of the disk tier


def main() -> None:
    """Become the server."""
    parser = argparse.ArgumentParser(prog="python -m services.storage.lmcache_server", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=int, default=PORT, help="port to listen on (%(default)s)")
    parser.add_argument("--memory-gb", type=float, default=1.0, help="memory for pages (%(default)s)")
    parser.add_argument("--folder", type=Path, help="files for pages, kept over restarts; none = memory only")
    parser.add_argument("--disk-gb", type=float, default=10.0, help="files above this are evicted (%(default)s)")
    arguments = parser.parse_args()
    environment = {**os.environ, "LMCACHE_TRACK_USAGE": "false", "PYTHONPATH": str(ROOT)}
    os.execve(sys.executable, command(arguments), environment)


def command(arguments: argparse.Namespace) -> list[str]:
    """The server's command line."""
    config = {"state": str(arguments.folder / "generation")} if arguments.folder else {}
    module = {"module_path": f"{__package__}.pages", "config": config}
    line = [
        *(sys.executable, "-m", "lmcache.v1.multiprocess.server"),
        *("--host", arguments.host, "--port", str(arguments.port)),
        *("--chunk-size", "8", "--supported-transfer-mode", "engine_driven"),  # nothing here uses LMCache's own chunks
        *("--l1-size-gb", str(arguments.memory_gb), "--no-l1-use-lazy", "--eviction-policy", "LRU"),
        *("--max-workers", str(WORKERS), "--disable-observability"),
        *("--server-module", json.dumps(module)),
    ]
    if arguments.folder:
        arguments.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        files = {
            "type": "fs_native",
            "base_path": str(arguments.folder),
            "num_workers": DISK_WORKERS,
            "max_capacity_gb": arguments.disk_gb,
            "eviction": {"eviction_policy": "LRU"},
        }
        line += ["--l2-adapter", json.dumps(files)]
    return line


if __name__ == "__main__":
    main()
