"""POST /kvtide/admin/{action}: flush, drain, undrain, attach, detach, clear. It asks for a key of its own."""

import typing
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.types import Receive, Scope, Send

from services.gateway.errors import ApiError, ClientGone, json_response, unavailable
from services.gateway.http import read_body
from services.gateway.parameters import decode
from services.gateway.scheduler_client import SchedulerClient
from shared.messages.gateway import AdminAction

ADMIN_PATH = "/kvtide/admin/"
ACTIONS = typing.get_args(AdminAction)
MAX_STORAGE_CHARS = 64  # an identity has up to 31


class AdminRequest(msgspec.Struct, kw_only=True):
    """POST /kvtide/admin/{action}: of a storage, or of all."""

    storage: Annotated[str, Meta(max_length=MAX_STORAGE_CHARS)] = ""


class Admin:
    """ASGI application of the route."""

    def __init__(self, client: SchedulerClient) -> None:
        self._client = client

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
        await json_response(await self._carry_out(action, request.storage))(scope, receive, send)

    async def _carry_out(self, action: AdminAction, storage: str) -> dict[str, Any]:
        done = await self._client.administer(action, storage)
        if done is None:
            raise unavailable("the scheduler does not answer: check that it runs (kvtide status)")
        if done.refusal:
            raise ApiError(409, done.refusal, code="not_done")
        return {"action": action, "storage": storage, **done.figures}
