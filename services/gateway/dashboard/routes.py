"""The dashboard's files, read once and served from memory."""

import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FOLDER = Path(__file__).parent
PAGE = "index.html"
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
}
HEADERS = {
    "cache-control": "no-cache",  # ask each time, by etag: a page of another version than its gateway misleads
    # Nothing from elsewhere, nothing sent elsewhere, in no other page's frame: answers are shown that a model wrote.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def dashboard_routes() -> list[Route]:
    """The page at `/`, its scripts and its style under `/dashboard/`. None needs a key: the data do."""
    routes = []
    for file in sorted(each for each in FOLDER.iterdir() if each.suffix in KINDS):
        path = "/" if file.name == PAGE else f"/dashboard/{file.name}"
        routes.append(Route(path, _File(file.read_bytes(), KINDS[file.suffix]).answer))
    return routes


class _File:
    def __init__(self, content: bytes, kind: str) -> None:
        self._content = content
        self._kind = kind
        self._headers = HEADERS | {"etag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}

    async def answer(self, request: Request) -> Response:
        """The file, or 304 when the browser has it."""
        if request.headers.get("if-none-match") == self._headers["etag"]:
            return Response(status_code=304, headers=self._headers)
        return Response(self._content, headers=self._headers, media_type=self._kind)
