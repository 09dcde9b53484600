"""What operators ask: /health, /metrics, /status, and what clients ask first: /v1/models."""

import logging
import time
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.errors import json_response, unavailable
from services.gateway.job import unknown_model
from services.gateway.metrics import CONTENT_TYPE, Counter, GatewayMetrics, StatusPage, gauge, untyped
from services.gateway.model import Model
from services.gateway.records import Records
from services.gateway.scheduler_client import SchedulerClient

T = TypeVar("T")

log = logging.getLogger("kvtide.gateway")


class SchedulerStatus(msgspec.Struct):
    """What the gateway reads in the scheduler's Status."""

    ready: bool = False
    peers: list[dict[str, Any]] = msgspec.field(default_factory=list)
    counters: dict[str, Any] = msgspec.field(default_factory=dict)


class Probes:
    """The GET routes."""

    def __init__(self, model: Model, client: SchedulerClient, records: Records, metrics: GatewayMetrics) -> None:
        self._model = model
        self._client = client
        self._records = records
        self._metrics = metrics
        self._started = int(time.time())

    async def health(self, request: Request) -> Response:
        """200 when every part is ready, else 503 with what is missing."""
        status = await self._status()
        missing = _missing(status)
        link = "up" if self._client.link.up else "down"
        body = {
            "status": "unavailable" if missing else "ok",
            "missing": missing,
            "scheduler": link,
            "peers": status.peers if status else [],
            "model": self._model.name,
        }
        return json_response(body, 503 if missing else 200)

    async def status(self, request: Request) -> Response:
        """The scheduler's Status as it is."""
        body = await self._client.status()
        if body is None:
            raise unavailable("the scheduler does not answer: check that it runs (kvtide status)")
        return Response(body, media_type="application/json")

    async def metrics(self, request: Request) -> Response:
        """Prometheus' text format: the gateway's own numbers, then the scheduler's. docs/metrics.md lists them."""
        link = self._client.link
        dropped = Counter("kvtide:link_dropped_total", "Messages of the scheduler link dropped, by reason.", "reason")
        for reason, count in link.counters.items():
            dropped.add(reason, amount=count)
        lines = [
            *self._metrics.lines(),
            *gauge("kvtide:num_requests_open", "Generation requests that are open.", self._records.open),
            *gauge("kvtide:scheduler_up", "1 while the scheduler is heard.", link.up),
            *dropped.lines(),
        ]
        status = await self._decoded(dict[str, Any]) or {}
        lines += StatusPage(status).lines()
        for name, value in (status.get("counters") or {}).items():
            if isinstance(value, int | float):
                lines += untyped(f"kvtide_scheduler_{name}", value)
        return Response("\n".join(lines) + "\n", headers={"content-type": CONTENT_TYPE})

    async def models(self, request: Request) -> Response:
        """OpenAI's list of models: one."""
        return json_response({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        """One model. 404 for another name."""
        asked = request.path_params["model"]
        if asked != self._model.name:
            raise unknown_model(asked, self._model.name)
        return json_response(self._card())

    def _card(self) -> dict[str, Any]:
        card = {"id": self._model.name, "object": "model", "created": self._started, "owned_by": "kvtide"}
        return card | {"max_model_len": self._model.context}

    async def _status(self) -> SchedulerStatus | None:
        return await self._decoded(SchedulerStatus)

    async def _decoded(self, kind: type[T]) -> T | None:
        body = await self._client.status()
        if body is None:
            return None
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.DecodeError as error:
            log.warning("status_malformed detail=%s", error)
            return None


def _missing(status: SchedulerStatus | None) -> list[str]:
    if status is None:
        return ["scheduler: it does not answer"]
    if status.ready:
        return []
    up = {peer.get("role") for peer in status.peers if peer.get("up")}
    silent = [f"{peer.get('identity')}: it is silent" for peer in status.peers if not peer.get("up")]
    absent = [f"{role}: none is up" for role in ("worker", "storage") if role not in up]
    return silent + absent or ["scheduler: it is not ready yet"]
