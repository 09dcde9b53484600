"""Metrics in Prometheus' text format (0.0.4). Names follow vLLM and SGLang."""

import re
from bisect import bisect_left
from collections import defaultdict

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Seconds, the buckets of vLLM.
TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
E2E_BUCKETS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)


class Counter:
    """A sum that only grows, for each combination of label values."""

    def __init__(self, name: str, text: str, *labels: str) -> None:
        self._name = name
        self._text = text
        self._labels = labels
        self._values: defaultdict[tuple[str, ...], float] = defaultdict(float)
        if not labels:
            self._values[()] = 0.0

    def add(self, *values: str, amount: float = 1) -> None:
        """Grow by `amount`; `values` are the labels'."""
        self._values[values] += amount

    def lines(self) -> list[str]:
        """Text format."""
        samples = [
            sample(self._name, value, dict(zip(self._labels, labels, strict=True)))
            for labels, value in sorted(self._values.items())
        ]
        return [*head(self._name, self._text, "counter"), *samples]


class Histogram:
    """Observations counted by upper bound."""

    def __init__(self, name: str, text: str, buckets: tuple[float, ...]) -> None:
        self._name = name
        self._text = text
        self._buckets = buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._buckets, value)] += 1
        self._sum += value

    def lines(self) -> list[str]:
        """Text format."""
        lines, total = head(self._name, self._text, "histogram"), 0
        for bound, count in zip((*map(str, self._buckets), "+Inf"), self._counts, strict=True):
            total += count
            lines.append(sample(f"{self._name}_bucket", total, {"le": bound}))
        return [*lines, sample(f"{self._name}_sum", self._sum), sample(f"{self._name}_count", total)]


class GatewayMetrics:
    """What the gateway itself counts."""

    def __init__(self) -> None:
        self.requests = Counter("kvtide:requests_total", "Generation requests by outcome.", "route", "status")
        self.http = Counter("kvtide:http_requests_total", "HTTP requests by status sent.", "route", "status")
        self.prompt_tokens = Counter("kvtide:prompt_tokens_total", "Prompt tokens of the requests.")
        self.generation_tokens = Counter("kvtide:generation_tokens_total", "Tokens generated.")
        self.cached_tokens = Counter(
            "kvtide:cached_tokens_total", "Prompt tokens that were not computed, by the tier that held them.", "tier"
        )
        self.ttft = Histogram(
            "kvtide:time_to_first_token_seconds", "From a request's headers to its first token.", TTFT_BUCKETS
        )
        self.e2e = Histogram("kvtide:e2e_request_latency_seconds", "From a request's headers to its end.", E2E_BUCKETS)

    def lines(self) -> list[str]:
        """Text format."""
        return [line for metric in vars(self).values() for line in metric.lines()]


def gauge(name: str, text: str, value: float) -> list[str]:
    """A single value that goes up and down."""
    return [*head(name, text, "gauge"), sample(name, value)]


def untyped(name: str, value: float) -> list[str]:
    """A value of another service; its name is made fit for Prometheus."""
    name = re.sub(r"[^a-zA-Z0-9_:]", "_", name)
    return [f"# TYPE {name} untyped", sample(name, value)]


def head(name: str, text: str, kind: str) -> list[str]:
    """HELP and TYPE."""
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]


def sample(name: str, value: float, labels: dict[str, str] | None = None) -> str:
    """One line."""
    inner = ",".join(f'{label}="{_escape(text)}"' for label, text in (labels or {}).items())
    return f"{name}{{{inner}}} {_number(value)}" if inner else f"{name} {_number(value)}"


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))
