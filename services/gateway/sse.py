"""A stream of server-sent events. Its headers go out with the first of them, so that an early error has a status."""

from typing import Any

import msgspec
from starlette.types import Send

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # asks nginx not to collect events
}


class EventStream:
    """Writes events; awaiting them slows the writer down to the client's pace."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._headers = HEADERS | {"x-request-id": request_id}
        self.started = False

    async def events(self, contents: list[dict[str, Any]]) -> None:
        """JSON events."""
        await self._write(b"".join(b"data: " + msgspec.json.encode(content) + b"\n\n" for content in contents))

    async def keep_alive(self) -> None:
        """A comment, which clients skip."""
        await self._write(b": keep-alive\n\n")

    async def end(self, complete: bool) -> None:
        """The last bytes. Only a complete answer ends with OpenAI's [DONE]."""
        await self._write(b"data: [DONE]\n\n" if complete else b"", more=False)

    async def _write(self, data: bytes, more: bool = True) -> None:
        if not self.started:
            self.started = True
            headers = [(name.encode(), value.encode()) for name, value in self._headers.items()]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
