"""OpenTelemetry spans of traced requests. Off, and free, unless `run.traces_endpoint` is set.

The trace context travels in the request id: a traced request's holds the trace id and the id of the gateway's span, so
that no message needs a field for it, and every log line leads to its trace.
"""

import logging
import re
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from shared.config import Config
from shared.errors import ConfigError

EXPORT_TIMEOUT_S = 2.0  # a collector that is slower loses spans; at the end a service waits this long for it, once

_TRACED = re.compile(r"-([0-9a-f]{32})([0-9a-f]{16})(?:-|$)")
_PARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")  # W3C traceparent
_SAMPLED = 1

log = logging.getLogger("kvtide.tracing")


class Context(NamedTuple):
    """Whose child a span is."""

    trace_id: int
    span_id: int


class _Active(NamedTuple):
    provider: Any
    tracer: Any
    api: Any  # opentelemetry.trace


_active: _Active | None = None


def start(config: Config, role: str, identity: str) -> None:
    """Switch tracing on for this process if the configuration wants it. Raises ConfigError without the package."""
    if config.run.traces_endpoint:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError(
                f"run.traces_endpoint needs OpenTelemetry, and {error.name} is not installed: "
                "pip install -c constraints.txt -e '.[otel]', or leave the key empty"
            ) from None
        exporter = OTLPSpanExporter(endpoint=config.run.traces_endpoint, timeout=EXPORT_TIMEOUT_S)
        start_with(BatchSpanProcessor(exporter), role, identity)


def start_with(processor: Any, role: str, identity: str) -> None:
    """Switch tracing on with a span processor."""
    global _active
    from opentelemetry import trace
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

    resource = Resource.create({"service.name": f"kvtide-{role}", "service.instance.id": identity})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(processor)
    _active = _Active(provider, provider.get_tracer("kvtide"), trace)


def stop() -> None:
    """Hand over what is left and switch tracing off."""
    global _active
    if _active is not None:
        _active.provider.shutdown()
        _active = None


class RequestSpan:
    """The gateway's span of one HTTP request, and the id that leads the others to it."""

    def __init__(self, name: str, traceparent: str) -> None:
        """traceparent: the client's header; empty = none. One that isn't sampled isn't traced."""
        parent = _PARENT.fullmatch(traceparent)
        self._span: Any = None
        if _active is not None and (parent is None or int(parent[3], 16) & _SAMPLED):
            context = _context(Context(int(parent[1], 16), int(parent[2], 16))) if parent else None
            self._span = _active.tracer.start_span(name, context=context, kind=_active.api.SpanKind.SERVER)

    def request_id(self, plain: str) -> str:
        """`plain`, or in place of its random part what `context_of` finds."""
        if self._span is None:
            return plain
        own = self._span.get_span_context()
        return f"{plain.partition('-')[0]}-{own.trace_id:032x}{own.span_id:016x}"

    def end(self, attributes: Mapping[str, Any]) -> None:
        """The request has ended."""
        if self._span is not None:
            self._span.set_attributes(_known(attributes))
            self._span.end()


def context_of(request_id: str) -> Context | None:
    """The gateway's span, if the request is traced."""
    found = _TRACED.search(request_id)
    return Context(int(found[1], 16), int(found[2], 16)) if found else None


def record(name: str, request_id: str, seconds: float, **attributes: Any) -> None:
    """A span of a request that ends now and has taken `seconds`; nothing unless it is traced. Any thread."""
    context = context_of(request_id) if _active is not None else None
    if _active is not None and context is not None:
        end_ns = time.time_ns()
        span = _active.tracer.start_span(name, context=_context(context), start_time=end_ns - int(seconds * 1e9))
        span.set_attributes(_known(attributes | {"kvtide.request_id": request_id}))
        span.end(end_ns)


def _context(parent: Context) -> Any:
    assert _active is not None
    trace = _active.api
    flags = trace.TraceFlags(trace.TraceFlags.SAMPLED)
    span = trace.NonRecordingSpan(trace.SpanContext(parent.trace_id, parent.span_id, is_remote=True, trace_flags=flags))
    return trace.set_span_in_context(span)


def _known(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is not None}
