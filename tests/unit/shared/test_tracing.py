"""A trace's context travels in the request id."""

from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from shared import tracing
from shared.config import Config, Run
from shared.errors import ConfigError

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-{}"


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    tracing.start_with(SimpleSpanProcessor(exporter), "gateway", "gateway-0")
    yield exporter
    tracing.stop()


def test_the_spans_of_other_services_are_children_of_the_gateways(spans: InMemorySpanExporter) -> None:
    request = tracing.RequestSpan("POST /v1/completions", PARENT.format("01"))
    request_id = request.request_id("cmpl-0123456789ab") + "-2-1"  # of a choice's attempt
    tracing.record("prefill", request_id, 0.5, tokens=7, missing=None)
    request.end({"status": 200, "missing": None})
    child, root = spans.get_finished_spans()
    assert root.context.trace_id == child.context.trace_id == 0x0AF7651916CD43DD8448EB211C80319C
    assert root.parent.span_id == 0xB7AD6B7169203331
    assert child.parent.span_id == root.context.span_id
    assert child.end_time - child.start_time == 500_000_000
    assert dict(child.attributes) == {"tokens": 7, "kvtide.request_id": request_id}
    assert dict(root.attributes) == {"status": 200}
    assert root.resource.attributes["service.name"] == "kvtide-gateway"


@pytest.mark.parametrize("header", ["", "nonsense", PARENT.format("01").upper()])
def test_without_a_parent_a_trace_begins(spans: InMemorySpanExporter, header: str) -> None:
    request = tracing.RequestSpan("POST", header)
    assert tracing.context_of(request.request_id("cmpl-1")) is not None
    request.end({})
    (root,) = spans.get_finished_spans()
    assert root.parent is None


def test_what_the_client_does_not_sample_is_not_traced(spans: InMemorySpanExporter) -> None:
    request = tracing.RequestSpan("POST", PARENT.format("00"))
    assert request.request_id("cmpl-1") == "cmpl-1"
    tracing.record("prefill", "cmpl-0123456789abcdef01234567-0-0", 0.5)
    request.end({})
    assert not spans.get_finished_spans()


def test_off_it_changes_nothing() -> None:
    request = tracing.RequestSpan("POST", PARENT.format("01"))
    assert request.request_id("cmpl-1") == "cmpl-1"
    tracing.record("prefill", "cmpl-" + "a" * 48, 0.5)
    request.end({})


def test_without_the_package_the_error_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    config: Any = Config(run=Run(traces_endpoint="http://127.0.0.1:4318/v1/traces"))
    with pytest.raises(ConfigError, match=r"run\.traces_endpoint needs OpenTelemetry.*\[otel\]"):
        tracing.start(config, "gateway", "gateway-0")
