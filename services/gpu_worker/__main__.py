"""`python -m services.gpu_worker`: one TP rank of a model."""

import asyncio
import os
import sys

from shared.config import Config
from shared.service import run_service

# Threads that spin while they wait starve the other processes: on few cores a decode step takes ten times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


async def serve(config: Config, identity: str, stop: asyncio.Event) -> None:
    """Set the number of threads, which OpenMP reads once, and only then import torch."""
    if config.worker.threads:
        os.environ["OMP_NUM_THREADS"] = str(config.worker.threads)
    else:
        os.environ.setdefault("OMP_NUM_THREADS", str(_cores()))

    from services.gpu_worker.service import serve as serve_worker

    await serve_worker(config, identity, stop)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


if __name__ == "__main__":
    sys.exit(run_service("gpu_worker", serve))
