"""Metrics in Prometheus' text format (0.0.4). Names follow vLLM and SGLang; docs/metrics.md lists them."""

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Seconds, the buckets of vLLM.
TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
TPOT_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
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
        self.tpot = Histogram(
            "kvtide:request_time_per_output_token_seconds", "Of a request: each token after the first.", TPOT_BUCKETS
        )
        self.queue = Histogram(
            "kvtide:request_queue_time_seconds", "From the scheduler's receipt to the first step.", E2E_BUCKETS
        )
        self.e2e = Histogram("kvtide:e2e_request_latency_seconds", "From a request's headers to its end.", E2E_BUCKETS)

    def lines(self) -> list[str]:
        """Text format."""
        return [line for metric in vars(self).values() for line in metric.lines()]


class Family(NamedTuple):
    """A metric made of the scheduler's Status."""

    kind: str
    text: str
    labels: tuple[str, ...] = ()


UNITS = ("pages", "bytes", "seconds")
PASSERS_BY = "cli-"  # the command line's identities: each would be a series of its own, for ever
TIER, MOVE = ("tier", "peer"), ("operation", "peer")
FAMILIES = {
    "num_requests_running": Family("gauge", "Requests in the running batch."),
    "num_requests_waiting": Family("gauge", "Requests that wait to be admitted, be it for L3."),
    "num_requests": Family("gauge", "Requests by state.", ("state",)),
    "num_preemptions_total": Family("counter", "Requests taken out of the running batch for want of pages."),
    "requests_rejected_total": Family("counter", "Requests that the scheduler refused, by code.", ("code",)),
    "requests_aborted_total": Family("counter", "Requests aborted, by the state they were in.", ("state",)),
    "prefix_cache_queries_total": Family("counter", "Prompt tokens looked up: hits and misses."),
    "prefix_cache_hits_total": Family("counter", "Prompt tokens that a tier had.", ("tier",)),
    "recent_hit_rate": Family("gauge", "Share of recent prompt tokens that device and host gave."),
    "recent_optimal_hit_rate": Family("gauge", "The same of the best possible cache of their size."),
    "storage_missed_pages_total": Family("counter", "Pages that L3 was asked for and did not have.", ("peer",)),
    "kv_cache_pages": Family("gauge", "Pages by state.", (*TIER, "state")),
    "kv_cache_usage_perc": Family("gauge", "Share of the tier in use; 1 is all of it.", TIER),
    "kv_cache_bytes": Family("gauge", "Bytes in use.", TIER),
    "kv_cache_capacity_bytes": Family("gauge", "Bytes of the pool, or L3's quota.", TIER),
    "evicted_pages_total": Family("counter", "Pages that made room for others.", TIER),
    "evicted_unread_pages_total": Family("counter", "Evicted pages that were written and never read.", TIER),
    "recomputed_tokens_total": Family("counter", "Prompt tokens computed that the tier had held before.", ("tier",)),
    "written_bytes_per_hit_token": Family("gauge", "Bytes written to the tier over tokens that it gave.", ("tier",)),
    "transfer_pages_total": Family("counter", "Pages moved between tiers.", MOVE),
    "transfer_bytes_total": Family("counter", "Bytes moved between tiers.", MOVE),
    "transfer_seconds_total": Family("counter", "Seconds spent on moving them.", MOVE),
    "transfer_bandwidth_bytes_per_second": Family("gauge", "Bytes over seconds since the process started.", MOVE),
    "storage_latency_seconds": Family("histogram", "Batches of up to 8 pages read from or written to L3.", MOVE),
    "dropped_pages_total": Family("counter", "Pages that were not moved, by reason.", (*MOVE, "reason")),
    "corrupt_pages_total": Family("counter", "Pages whose checksum was wrong when they were read.", TIER),
    "faults_total": Family("counter", "What went wrong and was survived.", ("kind", "peer")),
    "messages_dropped_total": Family("counter", "Messages dropped, by reason.", ("reason", "peer")),
    "engine_steps_total": Family("counter", "Forward steps.", ("peer",)),
    "engine_step_seconds_total": Family("counter", "Seconds of forward steps.", ("peer",)),
    "computed_tokens_total": Family(
        "counter", "Tokens computed: given, or sampled by the worker itself.", ("token", "peer")
    ),
    "peer_up": Family("gauge", "1 while the process is heard.", ("role", "peer")),
    "peer_silent_seconds": Family("gauge", "Seconds since its last message.", ("role", "peer")),
    "storage_attached": Family(
        "gauge", "1 while L3 is used, 0 while it rests after failures or is detached by an administrator.", ("peer",)
    ),
    "pages_in_flight": Family("gauge", "Pages that an operation fills, moves or gives back."),
    "pages_quarantined": Family("gauge", "Pages named to a process that has not answered."),
    "nodes_locked": Family("gauge", "Nodes of the tree that a request or an operation holds."),
    "tree_nodes": Family("gauge", "Nodes of the radix tree."),
    "integrity_ok": Family("gauge", "1 while every page, lock and count is right."),
    "scheduler_ready": Family("gauge", "1 while every part of the stack can be used."),
    "scheduler_uptime_seconds": Family("gauge", "Seconds since the scheduler started."),
}
RUNNING = ("running", "draining")
CORE = "scheduler"  # the `peer` of what the scheduler counts
MOVES = {"write": "write_backup", "load": "load_back", "l3_get": "prefetch", "l3_set": "archive"}

Rule = tuple[str, ...]  # pattern of a name, family, labels without `peer`; the first match counts
COUNTER_RULES: list[Rule] = [  # of the scheduler's counters
    ("retracted", "num_preemptions_total"),
    ("prompt_tokens", "prefix_cache_queries_total"),
    ("(device|host|storage)_hit_tokens", "prefix_cache_hits_total", r"\1"),
    ("(device|host)_evicted_pages", "evicted_pages_total", r"\1"),
    ("host_evicted_unread_pages", "evicted_unread_pages_total", "host"),
    ("recomputed_(device|host|storage)_tokens", "recomputed_tokens_total", r"\1"),
    ("recomputed_tokens", "recomputed_tokens_total", "any"),
    (r"rejected_(\d+)", "requests_rejected_total", r"\1"),
    (r"abort_(\w+)", "requests_aborted_total", r"\1"),
    (r"backup_dropped_(\w+)", "dropped_pages_total", "write_backup", r"\1"),
    (r"load_back_dropped_(\w+)", "dropped_pages_total", "load_back", r"\1"),
    (r"prefetch_dropped_(\w+)", "dropped_pages_total", "prefetch", r"\1"),
    ("archive_dropped_pages", "dropped_pages_total", "archive", "queue_full"),
    (r"((load|step)_failed_\w+|\w+_failed|prefetch_timed_out|peers_\w+|segment_refused)", "faults_total", r"\1"),
]
STAT_RULES: list[Rule] = [  # of the numbers in a worker's or a storage's heartbeat
    *((f"{name}_{unit}", f"transfer_{unit}_total", move) for name, move in MOVES.items() for unit in UNITS),
    ("steps", "engine_steps_total"),
    ("step_seconds", "engine_step_seconds_total"),
    ("prompt_tokens", "computed_tokens_total", "given"),
    ("decode_tokens", "computed_tokens_total", "sampled"),
    ("checksum_failed", "corrupt_pages_total", "host"),
    ("l3_corrupt", "corrupt_pages_total", "storage"),
    ("l3_miss", "storage_missed_pages_total"),
    ("l3_evicted", "evicted_pages_total", "storage"),
    ("l3_evicted_unread", "evicted_unread_pages_total", "storage"),
    ("l3_dropped", "dropped_pages_total", "archive", "queue_full"),
    ("l3_attached", "storage_attached"),
    ("l3_files", "kv_cache_pages", "storage", "stored"),
    ("l3_bytes", "kv_cache_bytes", "storage"),
    ("l3_quota_bytes", "kv_cache_capacity_bytes", "storage"),
    ("(device|host)_bytes", "kv_cache_capacity_bytes", r"\1"),
    (r"dropped_(\w+)", "messages_dropped_total", r"\1"),
    (r"l3_(\w+_failed|failures|detached|timed_out|bad_answers)", "faults_total", r"storage_\1"),
]


class StatusPage:
    """The scheduler's Status (docs/operations.md) as metrics; what it lacks has no sample."""

    def __init__(self, status: Mapping[str, Any]) -> None:
        self._samples: dict[str, list[str]] = {name: [] for name in FAMILIES}
        self._whole(status)
        for name, value in _part(status, "counters").items():
            self._by_rule(COUNTER_RULES, name, value, CORE)
        stats: dict[str, Mapping[str, Any]] = {}
        for peer in filter(lambda peer: "identity" in peer, status.get("peers") or []):
            stats[peer["identity"]] = self._peer(peer)
        worker = next((identity for identity, each in stats.items() if "device_bytes" in each), CORE)
        self._pool("device", worker, _part(status, "device"), stats.get(worker, {}))
        for storage, pool in _part(status, "host").items():
            self._pool("host", storage, pool, stats.get(storage, {}))

    def lines(self) -> list[str]:
        """Text format; every family has its head."""
        both = ((f"kvtide:{name}", family, self._samples[name]) for name, family in FAMILIES.items())
        return [line for name, about, samples in both for line in (*head(name, about.text, about.kind), *samples)]

    def _add(self, name: str, value: Any, *labels: str, peer: str = CORE) -> None:
        if isinstance(value, int | float):
            given = iter(labels)
            named = {label: peer if label == "peer" else next(given) for label in FAMILIES[name].labels}
            self._samples[name].append(sample(f"kvtide:{name}", value, named))

    def _by_rule(self, rules: list[Rule], name: str, value: Any, peer: str) -> None:
        for pattern, family, *labels in rules:
            if found := re.fullmatch(pattern, name):
                self._add(family, value, *map(found.expand, labels), peer=peer)
                return

    def _whole(self, status: Mapping[str, Any]) -> None:
        requests, scheduler = _part(status, "requests"), _part(status, CORE)
        states = {state: count for state, count in requests.items() if state != "open"}
        for state, count in states.items():
            self._add("num_requests", count, state)
        if states:
            running = sum(states.get(state, 0) for state in RUNNING)
            self._add("num_requests_running", running)
            self._add("num_requests_waiting", sum(states.values()) - running)
        self._add("pages_in_flight", status.get("in_flight"))
        self._add("pages_quarantined", status.get("quarantined"))
        self._add("nodes_locked", status.get("locked"))
        self._add("tree_nodes", _part(status, "tree").get("nodes"))
        self._add("integrity_ok", status["integrity"] == "ok" if "integrity" in status else None)
        self._add("scheduler_ready", status.get("ready"))
        self._add("scheduler_uptime_seconds", scheduler.get("uptime_s"))
        for name in ("hit_rate", "optimal_hit_rate"):
            self._add(f"recent_{name}", _part(status, "regret").get(name))
        for tier in ("host", "storage"):
            value = _part(_part(status, "investment"), tier).get("bytes_per_hit_token")
            self._add("written_bytes_per_hit_token", value, tier)
        for reason, count in scheduler.items():
            if reason not in ("epoch", "uptime_s"):
                self._add("messages_dropped_total", count, reason)

    def _peer(self, peer: Mapping[str, Any]) -> Mapping[str, Any]:
        identity, role, stats = peer["identity"], peer.get("role", ""), _part(peer, "stats")
        if identity.startswith(PASSERS_BY):
            return {}
        self._add("peer_up", peer.get("up"), role, peer=identity)
        self._add("peer_silent_seconds", peer.get("silent_s"), role, peer=identity)
        for name, value in stats.items():
            self._by_rule(STAT_RULES, name, value, identity)
        for name, move in MOVES.items():
            self._latency(name, {"operation": move, "peer": identity}, stats)
            if seconds := stats.get(f"{name}_seconds"):
                bandwidth = stats.get(f"{name}_bytes", 0) / seconds
                self._add("transfer_bandwidth_bytes_per_second", bandwidth, move, peer=identity)
        if quota := stats.get("l3_quota_bytes"):
            self._add("kv_cache_usage_perc", stats.get("l3_bytes", 0) / quota, "storage", peer=identity)
        return stats

    def _latency(self, name: str, labels: dict[str, str], stats: Mapping[str, Any]) -> None:
        if f"{name}_batches" in stats:
            metric, batches = "kvtide:storage_latency_seconds", stats[f"{name}_batches"]
            upto = {bound: value for key, value in stats.items() if (bound := key.removeprefix(f"{name}_le_")) != key}
            self._samples["storage_latency_seconds"] += [
                *(sample(f"{metric}_bucket", value, labels | {"le": bound}) for bound, value in upto.items()),
                sample(f"{metric}_bucket", batches, labels | {"le": "+Inf"}),
                sample(f"{metric}_sum", stats.get(f"{name}_seconds", 0), labels),
                sample(f"{metric}_count", batches, labels),
            ]

    def _pool(self, tier: str, peer: str, pool: Mapping[str, Any], stats: Mapping[str, Any]) -> None:
        for state, pages in pool.items():
            if state not in ("total", "usable"):
                self._add("kv_cache_pages", pages, tier, state, peer=peer)
        if total := pool.get("total"):
            used = 1 - pool.get("free", 0) / total
            self._add("kv_cache_usage_perc", used, tier, peer=peer)
            if f"{tier}_bytes" in stats:
                self._add("kv_cache_bytes", round(used * stats[f"{tier}_bytes"]), tier, peer=peer)


def _part(status: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A part that is an object; empty where the status has none."""
    return status.get(key) or {}


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
