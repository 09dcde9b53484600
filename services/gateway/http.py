"""Reading a body, and noticing that its sender has left."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from services.gateway.errors import ApiError, ClientGone
from services.gateway.limits import BODY_TIMEOUT_S, MAX_BODY_BYTES

T = TypeVar("T")


async def read_body(scope: Scope, receive: Receive) -> bytes:
    """The whole body. Raises ApiError 413 or 408, ClientGone."""
    announced = Headers(scope=scope).get("content-length", "0")
    if announced.isdecimal() and int(announced) > MAX_BODY_BYTES:
        raise _too_large(int(announced))
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone("the client left while it sent the body")
                body += message.get("body", b"")
                if len(body) > MAX_BODY_BYTES:
                    raise _too_large(len(body))
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_TIMEOUT_S:.0f} s: send it again") from None


async def until_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do `work`, which is cancelled when the client closes the connection: then raises ClientGone."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone("the client left before its answer was complete")
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _too_large(size: int) -> ApiError:
    return ApiError(413, f"a body of {size} bytes is larger than {MAX_BODY_BYTES}: send less", code="body_too_large")
