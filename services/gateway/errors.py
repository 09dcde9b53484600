"""What a client is told when something is wrong: OpenAI's error body."""

from typing import Any

import msgspec
from starlette.responses import Response

from services.gateway.limits import RETRY_BUSY_S, RETRY_RESTART_S
from shared.errors import KvtideError

KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(KvtideError):
    """Ends a request with an HTTP status and a message that says what to do."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: int = 0
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s  # 0 = the same request won't succeed later

    def body(self) -> dict[str, Any]:
        """OpenAI's shape."""
        kind = KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The answer while no header has been sent."""
        headers = {"Retry-After": str(self.retry_after_s)} if self.retry_after_s else {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return json_response(self.body(), self.status, headers)


class ClientGone(KvtideError):
    """The client has closed its connection."""


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON answer."""
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


def invalid(message: str, param: str | None, code: str | None = None) -> ApiError:
    """400: the request can't be served as it is."""
    return ApiError(400, message, param=param, code=code)


def rejected(code: int, message: str, retry: bool) -> ApiError:
    """The scheduler's Reject."""
    status = code if 400 <= code <= 599 else 500
    wait_s = {429: RETRY_BUSY_S, 503: RETRY_RESTART_S}.get(status, 0)
    return ApiError(status, message, code="rejected", retry_after_s=wait_s if retry else 0)


def unavailable(message: str) -> ApiError:
    """503, worth another try."""
    return ApiError(503, message, code="unavailable", retry_after_s=RETRY_RESTART_S)
