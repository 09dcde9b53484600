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
    model: Model, client: SchedulerClient, records: Records, metrics: GatewayMetrics, keys: tuple[str, ...]
) -> Starlette:
    """The ASGI application."""
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
        Route("/openapi.json", OpenApi(model, bool(keys)).page),
    ]
    page = dashboard_routes()
    open_paths = OPEN_PATHS | {route.path for route in page}
    routes += page
    app = Starlette(
        routes=routes,
        middleware=[Middleware(Front, keys=keys, metrics=metrics, routes=routes, open_paths=open_paths)],
        exception_handlers={ApiError: _api_error, HTTPException: _http_error, Exception: _bug},
    )
    app.router.redirect_slashes = False
    return app


class Front:
    """Asks for a key where there are any, and counts answers by route and status."""

    def __init__(
        self,
        app: ASGIApp,
        keys: tuple[str, ...],
        metrics: GatewayMetrics,
        routes: list[BaseRoute],
        open_paths: frozenset[str],
    ) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
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

        if path in self._open_paths or self._allowed(Headers(scope=scope).get("authorization", "")):
            await self._app(scope, receive, counted)
            return
        message = "no API key or a wrong one: send the header Authorization: Bearer <key>, one of gateway.api_keys"
        await ApiError(401, message, code="invalid_api_key").response()(scope, receive, counted)

    def _allowed(self, header: str) -> bool:
        if not self._keys:
            return True
        scheme, _, given = header.partition(" ")
        # Every key is compared, each in constant time, so that the time says nothing about any of them.
        matches = [hmac.compare_digest(given.strip().encode("latin-1"), key) for key in self._keys]
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
