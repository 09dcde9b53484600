"""`kvtide flush | drain | attach | ...`: change a running stack over the scheduler's socket.

`kvtide pin` asks the gateway, which knows the tokens of a text.
"""

import asyncio
from typing import Any

from kvtide.child import StackError
from kvtide.status import Guest
from kvtide.why import ask_gateway
from shared.config import Config
from shared.errors import ProtocolError
from shared.messages.gateway import AdminAction, Administer, Administered

ANSWER_TIMEOUT_S = 40.0  # the scheduler gives a storage up that is silent for 30 s
QUESTION = 1  # one a process

ACTIONS: dict[AdminAction, str] = {  # of a storage, or of all
    "flush": "forget every page in device and host memory that nothing uses; L3 keeps its pages",
    "drain": "take a storage's pages out and give it no new ones, so that it can be stopped",
    "undrain": "let a drained storage take pages again",
    "attach": "use a storage's L3 again",
    "detach": "leave a storage's L3 alone until it is attached",
    "clear": "delete every page of a storage's L3",
}
NEEDS_STORAGE = ("drain", "undrain")


class _Wish(Guest):
    """Asks once, and keeps the answer."""

    def __init__(self, endpoint: str, wish: Administer) -> None:
        super().__init__(endpoint)
        self._wish = wish
        self.answer: asyncio.Future[Administered] = asyncio.get_running_loop().create_future()

    def on_scheduler(self, epoch: int) -> None:
        self.link.send(self._wish)

    def on_message(self, message: Any) -> None:
        if isinstance(message, Administered) and not self.answer.done():
            self.answer.set_result(message)


async def pin(config: Config, text: str, salt: str, ttl_s: float, url: str) -> dict[str, int]:
    """Have what the stack caches of a text pinned. Raises StackError with the gateway's words when it refuses."""
    keys = config.gateway.admin_keys
    body = await ask_gateway(
        config, "POST", "/kvtide/admin/pin", url, keys, {"prompt": text, "cache_salt": salt, "ttl_s": ttl_s}
    )
    return {name: body[name] for name in ("pin", "pages")}


async def administer(endpoint: str, action: AdminAction, storage: str = "", pin: int = 0) -> dict[str, int]:
    """Have the stack changed; returns what the scheduler counted. Raises StackError with its reason when it refuses."""
    wish = _Wish(endpoint, Administer(QUESTION, action, storage, pin=pin))
    try:
        async with wish as link:
            first: list[asyncio.Future[Any]] = [wish.answer, link]
            await asyncio.wait(first, timeout=ANSWER_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
            if link.done():
                link.result()
            if not wish.answer.done():
                raise StackError(
                    f"no scheduler answers at {endpoint} within {ANSWER_TIMEOUT_S:g} s; "
                    "is the stack running (kvtide serve), with the same --config and --set?"
                )
            answer = wish.answer.result()
    except ProtocolError as error:
        raise StackError(f"the scheduler at {endpoint} refuses: {error}") from None
    if answer.refusal:
        raise StackError(answer.refusal)
    return answer.figures
