"""`kvtide serve`: the whole stack in the foreground, until it is told to stop."""

import asyncio
import time
from collections.abc import Callable

from kvtide.stack import running_stack
from kvtide.tiers import describe_tiers
from shared.config import Config

EXAMPLE = (
    "curl {url}/v1/chat/completions -H 'content-type: application/json' -d '"
    '{{"model": "{model}", "temperature": 0, "max_tokens": 80, '
    '"messages": [{{"role": "user", "content": "Why does the tide come twice a day?"}}]}}\''
)


async def serve(config: Config, say: Callable[[str], None]) -> None:
    """Run the stack until cancelled. `say` gets one line per event. Raises StackError when a service can't be kept."""
    started = time.monotonic()
    async with running_stack(config, report=say) as stack:
        for line in describe_tiers(stack.config):
            say(line)
        await stack.wait_ready(timeout_s=None)
        say(f"ready after {time.monotonic() - started:.1f} s: {stack.config.model.name} at {stack.url}")
        say("try: " + EXAMPLE.format(url=stack.url, model=stack.config.model.name))
        try:
            await stack.watch()
        except asyncio.CancelledError:
            say("stopping: running requests may end, new ones are refused (again to stop at once)")
            raise
