"""Faults of a link between two services."""

import asyncio

from tests.faults.matrix.cells import PAGE_LINK
from tests.faults.proxy import TcpProxy

DELAY_S = 0.2  # of each piece of up to 64 KiB
RESETS = 5
CORRUPT_EVERY = 5  # pieces, one of which has a flipped bit
RATES = {PAGE_LINK: 1_000_000}  # bytes/s: a page of the small stack has 0.7 MB
CONTROL_RATE = 5_000  # bytes/s: a heartbeat has some 500, a step 1,000


async def disturb(proxy: TcpProxy, link: str, fault: str, seconds: float) -> int:
    """Disturb a link for a time, while traffic goes on. Returns how many pieces came to its proxy meanwhile."""
    before = proxy.chunks
    try:
        match fault:
            case "delay":
                proxy.delay_s = DELAY_S
            case "stall":
                proxy.stall()
            case "reset":
                for _ in range(RESETS - 1):
                    proxy.reset()
                    await asyncio.sleep(seconds / RESETS)
                proxy.reset()
                seconds /= RESETS
            case "corrupt":
                proxy.corrupt_every = CORRUPT_EVERY
            case "throttle":
                proxy.rate = RATES.get(link, CONTROL_RATE)
            case _:
                raise ValueError(f"a link has no fault {fault!r}")
        await asyncio.sleep(seconds)
        return proxy.chunks - before
    finally:
        proxy.delay_s, proxy.rate, proxy.corrupt_every = 0.0, 0.0, 0
        proxy.resume()
