"""The life of a worker service."""

import asyncio

from services.gpu_worker.engine import build_engine
from services.gpu_worker.worker import Worker
from shared.config import Config


async def serve(config: Config, identity: str, stop: asyncio.Event) -> None:
    """Load the model, allocate the pools, then obey the scheduler until `stop` is set.

    Raises ModelError, CapacityError or ConfigError when it can't start, ProtocolError when the scheduler refuses it.
    """
    # 1. Everything that takes memory, so that a worker which has said hello can keep its word.
    engine = await asyncio.to_thread(build_engine, config)
    # 2. Serve.
    worker = Worker(config.scheduler_endpoint, identity, engine, config.worker.host_path)
    link = asyncio.create_task(worker.link.run())
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({link, stopped}, return_when=asyncio.FIRST_COMPLETED)
    # 3. Answer what is under way, let the memory go, close the link.
    stopped.cancel()
    await worker.close()
    link.cancel()
    await asyncio.wait({link})
    if not link.cancelled():
        link.result()  # raises what ended it
