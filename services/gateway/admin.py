"""POST /kvtide/admin/{action}: flush, drain, attach, pin and so on. It asks for a key of its own."""

import typing
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.types import Receive, Scope, Send

from services.gateway.chat import conversation
from services.gateway.errors import ApiError, ClientGone, invalid, json_response, unavailable
from services.gateway.http import read_body
from services.gateway.job import check_tokens, tokenize
from services.gateway.limits import MAX_SALT_CHARS
from services.gateway.model import Model
from services.gateway.parameters import decode
from services.gateway.requests import ChatMessage
from services.gateway.scheduler_client import SchedulerClient
from shared.messages.gateway import MAX_TTL_S, AdminAction, Administer, Namespace
from shared.packed import pack

ADMIN_PATH = "/kvtide/admin/"
ACTIONS = typing.get_args(AdminAction)
MAX_STORAGE_CHARS = 64  # an identity has up to 31
DEFAULT_TTL_S = 3600.0  # of a pin
MAX_PIN = 2**53  # a number of a pin: what JSON's numbers hold exactly


class AdminRequest(msgspec.Struct, kw_only=True):
    """POST /kvtide/admin/{action}: of a storage, or of all; what to pin, or the pin to end."""

    storage: Annotated[str, Meta(max_length=MAX_STORAGE_CHARS)] = ""
    prompt: str | list[int] = ""  # text or token ids, as a completion takes them
    messages: list[ChatMessage] = msgspec.field(default_factory=list)  # or a conversation, as a chat takes it
    cache_salt: Annotated[str, Meta(max_length=MAX_SALT_CHARS)] = ""  # whose pages
    ttl_s: Annotated[float, Meta(gt=0, le=MAX_TTL_S)] = DEFAULT_TTL_S  # seconds that a pin lasts
    pin: Annotated[int, Meta(ge=0, le=MAX_PIN)] = 0  # number of the pin to end


class Admin:
    """ASGI application of the route."""

    def __init__(self, client: SchedulerClient, model: Model) -> None:
        self._client = client
        self._model = model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, unless the client leaves first. ApiError 404: an unknown action, 409: one that can't be done."""
        action = scope["path_params"]["action"]
        if action not in ACTIONS:
            raise ApiError(404, f"there is no action {action!r}: {', '.join(ACTIONS)}", code="unknown_action")
        try:
            body = await read_body(scope, receive)
        except ClientGone:
            return
        request = decode(body or b"{}", AdminRequest)
        await json_response(await self._carry_out(action, request, len(body)))(scope, receive, send)

    async def _carry_out(self, action: AdminAction, request: AdminRequest, size: int) -> dict[str, Any]:
        tokens = b""
        if action == "pin":
            tokens = pack(await self._tokens(request, size))
        done = await self._client.administer(
            lambda question: Administer(
                question,
                action,
                request.storage,
                tokens,
                Namespace(tenant=request.cache_salt),
                request.ttl_s if action == "pin" else 0.0,
                request.pin,
            )
        )
        if done is None:
            raise unavailable("the scheduler does not answer: check that it runs (kvtide status)")
        if done.refusal:
            raise ApiError(409, done.refusal, code="not_done")
        return {"action": action, "storage": request.storage, **done.figures}

    async def _tokens(self, request: AdminRequest, size: int) -> list[int]:
        """Raises ApiError 400 when there is no one prompt."""
        if bool(request.prompt) == bool(request.messages):
            raise invalid("send either prompt or messages: what is to be pinned", "prompt")
        if request.messages:
            return (await conversation(request.messages, [], size, self._model))[1]
        if isinstance(request.prompt, str):
            return await tokenize(request.prompt, self._model, add_special_tokens=True)
        return check_tokens(request.prompt, self._model)
