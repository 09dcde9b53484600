"""`kvtide flush | drain | attach | ...`: change a running stack over the scheduler's socket.

`kvtide pin` asks the gateway, which knows the tokens of a text.
"""

from kvtide.child import StackError
from kvtide.guest import ask
from kvtide.why import ask_gateway
from shared.config import Config
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


async def pin(config: Config, text: str, salt: str, ttl_s: float, url: str) -> dict[str, int]:
    """Have what the stack caches of a text pinned. Raises StackError with the gateway's words when it refuses."""
    keys = config.gateway.admin_keys
    body = await ask_gateway(
        config, "POST", "/kvtide/admin/pin", url, keys, {"prompt": text, "cache_salt": salt, "ttl_s": ttl_s}
    )
    return {name: body[name] for name in ("pin", "pages")}


async def administer(endpoint: str, action: AdminAction, storage: str = "", pin: int = 0) -> dict[str, int]:
    """Have the stack changed; returns what the scheduler counted. Raises StackError with its reason when it refuses."""
    answer = await ask(endpoint, Administer(QUESTION, action, storage, pin=pin), Administered, ANSWER_TIMEOUT_S)
    if answer.refusal:
        raise StackError(answer.refusal)
    return answer.figures
