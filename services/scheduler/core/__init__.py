"""The pure core: no socket, clock, thread, file, torch or asyncio. `core.Core` is its front."""
