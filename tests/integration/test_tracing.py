"""One request's trace through all services, as an OpenTelemetry collector gets it, and their JSON log lines."""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from msgspec.structs import replace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from kvtide.stack import Stack, running_stack
from tests.integration.harness import READY_TIMEOUT_S, prompt, settle, small_config

pytestmark = pytest.mark.asyncio(loop_scope="session")

WAIT_S = 20.0  # exporters hand over every 5 s


class Collector:
    """OTLP over HTTP, as much of it as exporters use."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []  # (service.name, span)

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        while request := await reader.readuntil(b"\r\n\r\n"):
            headers = dict(line.split(": ", 1) for line in request.decode().lower().splitlines()[1:-1])
            body = await reader.readexactly(int(headers["content-length"]))
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                names = {each.key: each.value.string_value for each in resource.resource.attributes}
                self.spans += [(names["service.name"], span) for scope in resource.scope_spans for span in scope.spans]
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

    async def trace(self, trace_id: str, services: set[str]) -> list[tuple[str, Any]]:
        """The spans of a trace, once all of `services` have sent some."""
        deadline = asyncio.get_running_loop().time() + WAIT_S
        while True:
            found = [(name, span) for name, span in self.spans if span.trace_id.hex() == trace_id]
            if {name for name, _ in found} >= services:
                return found
            assert asyncio.get_running_loop().time() < deadline, f"{sorted(name for name, _ in found)} after {WAIT_S} s"
            await asyncio.sleep(0.1)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def collector() -> AsyncIterator[tuple[Collector, int]]:
    collector = Collector()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await collector.take(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    yield collector, server.sockets[0].getsockname()[1]
    server.close()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stack(module_folder: Path, collector: tuple[Collector, int]) -> AsyncIterator[Stack]:
    config = small_config(module_folder)
    config = replace(config, cache=replace(config.cache, host_bytes=config.cache.host_bytes // 4))
    endpoint = f"http://127.0.0.1:{collector[1]}/v1/traces"
    config = replace(config, run=replace(config.run, traces_endpoint=endpoint, log_format="json"))
    async with running_stack(config) as running:
        await running.wait_ready(READY_TIMEOUT_S)
        yield running


async def post(stack: Stack, number: int, traceparent: str = "") -> str:
    """One completion; returns its request id."""
    body = {"model": stack.config.model.name, "prompt": prompt(number), "max_tokens": 4, "temperature": 0}
    headers = {"traceparent": traceparent} if traceparent else {}
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        response = await client.post(f"{stack.url}/v1/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text
    return response.headers["x-request-id"]


async def test_a_request_is_traced_through_all_services(stack: Stack, collector: tuple[Collector, int]) -> None:
    for number in range(8):  # more than device and host pool hold: the first is in L3 alone
        await post(stack, number)
        await settle(stack)
    trace_id, parent = secrets.token_hex(16), secrets.token_hex(8)
    request_id = await post(stack, 0, f"00-{trace_id}-{parent}-01")
    assert trace_id in request_id
    services = {"kvtide-gateway", "kvtide-scheduler", "kvtide-gpu_worker", "kvtide-storage"}
    spans = await collector[0].trace(trace_id, services)
    root = next(span for name, span in spans if name == "kvtide-gateway")
    assert root.parent_span_id.hex() == parent
    others = {span.name: span for name, span in spans if name != "kvtide-gateway"}
    assert set(others) == {"schedule", "lookup", "prefetch", "prefill"}
    assert {span.parent_span_id for span in others.values()} == {root.span_id}
    slack_ns = 5_000_000  # two processes' readings of one clock, and seconds as floats
    for span in others.values():
        assert root.start_time_unix_nano - slack_ns < span.start_time_unix_nano
        assert span.start_time_unix_nano <= span.end_time_unix_nano < root.end_time_unix_nano + slack_ns
    hits = {each.key: each.value.int_value for each in root.attributes}
    assert hits["kvtide.storage_hit_tokens"] > 0


async def test_json_log_lines_of_all_services_name_the_request(stack: Stack) -> None:
    request_id = await post(stack, 1)
    await settle(stack)
    for identity in ("gateway-0", "scheduler-0", "gpu_worker-0", "storage-0"):
        text = (stack.config.run_folder / "logs" / f"{identity}.log").read_text()
        lines = [json.loads(line) for line in text.splitlines()]
        assert {line["process"] for line in lines} == {identity}
        about = [line for line in lines if request_id in json.dumps(line)]
        assert about, f"{identity} has no line about {request_id}"
