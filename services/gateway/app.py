"""The routes, and what stands in front of all of them: keys, counting, errors in OpenAI's shape."""

import hmac

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.admin import ADMIN_PATH, Admin
from services.gateway.chat import Chat
from services.gateway.completions import Completions
from services.gateway.dashboard.routes import dashboard_routes
from services.gateway.errors import ApiError
from services.gateway.generate import Generate
from services.gateway.grammar import GrammarChecker
from services.gateway.metrics import GatewayMetrics
from services.gateway.model import Model
from services.gateway.openapi import OpenApi
from services.gateway.probes import Probes
from services.gateway.records import Records
from services.gateway.scheduler_client import SchedulerClient
from services.gateway.token_routes import JsonRoute, TokenRoutes
from services.gateway.why import Why

OPEN_PATHS = frozenset(("/health", "/metrics"))  # for probes, which have no key; so is the dashboard's page, empty yet


def build_app(
    model: Model,
    client: SchedulerClient,
    records: Records,
    metrics: GatewayMetrics,
    keys: tuple[str, ...],
    admin_keys: tuple[str, ...] = (),
) -> Starlette:
    """The ASGI application. keys: empty = none is asked for. admin_keys: empty = nobody may use the admin routes."""
    chat = Chat(model, GrammarChecker(model))
    tokens = TokenRoutes(model)
    probes = Probes(model, client, records, metrics)
    routes: list[BaseRoute] = [
        Route("/health", probes.health),
        Route("/metrics", probes.metrics),
        Route("/status", probes.status),
        Route("/v1/models", probes.models),
        Route("/v1/models/{model:path}", probes.model),
        Route("/v1/completions", Generate(Completions(model), model, client, records), methods=["POST"]),
        Route("/v1/chat/completions", Generate(chat, model, client, records), methods=["POST"]),
        Route("/tokenize", JsonRoute(tokens.tokenize), methods=["POST"]),
        Route("/detokenize", JsonRoute(tokens.detokenize), methods=["POST"]),
        Route("/kvtide/why/{id}", Why(client).page),
        Route(ADMIN_PATH + "{action}", Admin(client, model), methods=["POST"]),
        Route("/openapi.json", OpenApi(model, bool(keys)).page),
    ]
    page = dashboard_routes()
    open_paths = OPEN_PATHS | {route.path for route in page}
    routes += page
    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(Front, keys=keys, admin_keys=admin_keys, metrics=metrics, routes=routes, open_paths=open_paths)
        ],
        exception_handlers={ApiError: _api_error, HTTPException: _http_error, Exception: _bug},
    )
    app.router.redirect_slashes = False
    return app


class Front:
    """Asks for a key where there are any, on the admin routes always; counts answers by route and status."""

    def __init__(
        self,
        app: ASGIApp,
        keys: tuple[str, ...],
        admin_keys: tuple[str, ...],
        metrics: GatewayMetrics,
        routes: list[BaseRoute],
        open_paths: frozenset[str],
    ) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._admin_keys = [key.encode() for key in admin_keys]
        self._metrics = metrics
        self._open_paths = open_paths
        self._labels = {route.path for route in routes if isinstance(route, Route)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or answer 401."""
        path = scope["path"]
        label = path if path in self._labels else "other"

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.http.add(label, str(message["status"]))
            await send(message)

        header = Headers(scope=scope).get("authorization", "")
        refusal = None if path in self._open_paths else self._refusal(path, header)
        await (self._app if refusal is None else refusal.response())(scope, receive, counted)

    def _refusal(self, path: str, header: str) -> ApiError | None:
        admin = path.startswith(ADMIN_PATH)
        if admin and not self._admin_keys:
            text = (
                "nobody may do this over HTTP: set gateway.admin_keys (kvtide pin needs one, its other commands none)"
            )
            return ApiError(403, text, code="no_admin_keys")
        keys, name = (self._admin_keys, "admin_keys") if admin else (self._keys, "api_keys")
        if not keys or _has(header, keys):
            return None
        text = f"no API key or a wrong one: send the header Authorization: Bearer <key>, one of gateway.{name}"
        return ApiError(401, text, code="invalid_api_key")


def _has(header: str, keys: list[bytes]) -> bool:
    scheme, _, given = header.partition(" ")
    # Every key is compared, each in constant time, so that the time says nothing about any of them.
    matches = [hmac.compare_digest(given.strip().encode("latin-1"), key) for key in keys]
    return scheme.lower() == "bearer" and any(matches)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    method, path = request.method, request.url.path
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        response = ApiError(405, f"{path} does not take {method}: use {allowed}", code="method_not_allowed").response()
        response.headers["Allow"] = allowed
        return response
    text = f"there is no {path}: /openapi.json lists what there is" if (error.status_code == 404) else error.detail
    return ApiError(error.status_code, text, code="unknown_route").response()


async def _bug(request: Request, error: Exception) -> Response:
    return ApiError(500, "an error inside the gateway: its log says more", code="internal").response()
