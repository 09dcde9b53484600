"""The page at `/` as a browser gets it, and the metrics that docs/metrics.md lists."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from services.gateway.dashboard.routes import FOLDER
from services.gateway.metrics import FAMILIES, StatusPage
from tests.unit.gateway.harness import Stack, run_stack
from tests.unit.gateway.test_probes import parse

ROOT = Path(__file__).parents[3]
ROW = re.compile(r"^\| `(\S+)` \| (\w+) \| (.*?) \| (.+) \|$", re.MULTILINE)

STATUS: dict[str, Any] = {
    "ready": True,
    "integrity": "ok",
    "locked": 1,
    "in_flight": 2,
    "quarantined": 3,
    "requests": {"queued": 2, "lookup": 1, "prefetching": 1, "running": 4, "draining": 1, "open": 9},
    "device": {"total": 40, "free": 10, "evictable": 20, "protected": 10},
    "host": {"storage-0": {"total": 80, "free": 60, "cached": 20, "usable": 1}},
    "tree": {"nodes": 7, "namespaces": 1},
    "counters": {
        "prompt_tokens": 1000,
        "device_hit_tokens": 100,
        "host_hit_tokens": 50,
        "storage_hit_tokens": 25,
        "device_evicted_pages": 5,
        "host_evicted_unread_pages": 8,
        "recomputed_device_tokens": 30,
        "recomputed_tokens": 40,
        "backup_dropped_no_host_page": 6,
        "archive_dropped_pages": 7,
        "load_failed_checksum": 1,
        "backup_failed": 2,
        "peers_lost": 1,
        "rejected_429": 3,
        "abort_running": 4,
        "retracted": 5,
    },
    "regret": {"requests": 512, "hit_rate": 0.25, "optimal_hit_rate": 0.4},
    "investment": {"host": {"bytes_per_hit_token": 6.5}, "storage": {"bytes_per_hit_token": None}},
    "scheduler": {"epoch": 1, "uptime_s": 12.5, "old_epoch": 2},
    "peers": [
        {
            "identity": "gpu_worker-0",
            "role": "worker",
            "up": True,
            "silent_s": 0.5,
            "stats": {
                "device_bytes": 4000, "steps": 9, "prompt_tokens": 825, "write_pages": 3, "write_bytes": 300,
                "write_seconds": 0.5, "load_bytes": 0, "load_seconds": 0, "dropped_stale": 2, "checksum_failed": 1,
            },
        },
        {
            "identity": "storage-0",
            "role": "storage",
            "up": False,
            "silent_s": 5,
            "stats": {
                "host_bytes": 8000, "l3_attached": 0, "l3_bytes": 250, "l3_quota_bytes": 1000, "l3_files": 2,
                "l3_set_pages": 2, "l3_set_bytes": 250, "l3_corrupt": 1, "l3_read_failed": 1, "l3_miss": 4,
                "l3_evicted_unread": 9, "l3_set_seconds": 0.25, "l3_set_batches": 3, "l3_set_le_0.1": 2,
                "l3_set_le_10": 3,
            },
        },
        {"identity": "cli-77", "role": "gateway", "up": True, "silent_s": 0, "stats": {}},
    ],
}  # fmt: skip


@pytest.mark.parametrize("keys", [(), ("secret",)], ids=["open", "keys"])
async def test_the_page_needs_no_key_and_nothing_from_elsewhere(run_folder, model_folder, keys) -> None:
    async with run_stack(run_folder, model_folder, keys=keys) as stack, stack.client() as client:
        page = await client.get("/")
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        wanted = re.findall(r'(?:src|href)="(dashboard/[^"]+)"', page.text)
        assert len(wanted) == 2
        for script in [path for path in wanted if path.endswith(".js")]:
            wanted += [
                f"dashboard/{name}" for name in re.findall(r'from "\./(\w+\.js)"', (await client.get(script)).text)
            ]
        kinds = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8"}
        for path in wanted:
            answer = await client.get(path)
            assert answer.headers["content-type"] == kinds[path.rpartition(".")[2]]
            again = await client.get(path, headers={"if-none-match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        assert (await client.post("/")).status_code == 405
        assert (await client.get("/dashboard/routes.py")).status_code in (401, 404)
        assert (await client.get("/status")).status_code == (401 if keys else 200)


def test_no_file_names_another_host() -> None:
    for file in (each for each in FOLDER.iterdir() if each.suffix in (".html", ".css", ".js")):
        text = file.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|url\(|@import", text), file.name
        assert len(text.splitlines()) < 300, file.name


async def test_the_metrics_of_a_status(stack: Stack) -> None:
    stack.scheduler.status = json.dumps(STATUS).encode()
    async with stack.client() as client:
        samples = parse((await client.get("/metrics")).text)
    expected = {
        "num_requests_running": 5,
        "num_requests_waiting": 4,
        'num_requests{state="queued"}': 2,
        "num_preemptions_total": 5,
        'requests_rejected_total{code="429"}': 3,
        'requests_aborted_total{state="running"}': 4,
        "prefix_cache_queries_total": 1000,
        'prefix_cache_hits_total{tier="host"}': 50,
        "recent_hit_rate": 0.25,
        "recent_optimal_hit_rate": 0.4,
        'storage_missed_pages_total{peer="storage-0"}': 4,
        'kv_cache_pages{tier="device",peer="gpu_worker-0",state="evictable"}': 20,
        'kv_cache_pages{tier="storage",peer="storage-0",state="stored"}': 2,
        'kv_cache_usage_perc{tier="device",peer="gpu_worker-0"}': 0.75,
        'kv_cache_usage_perc{tier="host",peer="storage-0"}': 0.25,
        'kv_cache_usage_perc{tier="storage",peer="storage-0"}': 0.25,
        'kv_cache_bytes{tier="device",peer="gpu_worker-0"}': 3000,
        'kv_cache_bytes{tier="host",peer="storage-0"}': 2000,
        'kv_cache_capacity_bytes{tier="host",peer="storage-0"}': 8000,
        'evicted_pages_total{tier="device",peer="scheduler"}': 5,
        'evicted_unread_pages_total{tier="host",peer="scheduler"}': 8,
        'evicted_unread_pages_total{tier="storage",peer="storage-0"}': 9,
        'recomputed_tokens_total{tier="device"}': 30,
        'recomputed_tokens_total{tier="any"}': 40,
        'written_bytes_per_hit_token{tier="host"}': 6.5,
        'transfer_pages_total{operation="write_backup",peer="gpu_worker-0"}': 3,
        'transfer_bytes_total{operation="archive",peer="storage-0"}': 250,
        'transfer_seconds_total{operation="write_backup",peer="gpu_worker-0"}': 0.5,
        'transfer_bandwidth_bytes_per_second{operation="write_backup",peer="gpu_worker-0"}': 600,
        'transfer_seconds_total{operation="archive",peer="storage-0"}': 0.25,
        'transfer_bandwidth_bytes_per_second{operation="archive",peer="storage-0"}': 1000,
        'storage_latency_seconds_bucket{operation="archive",peer="storage-0",le="0.1"}': 2,
        'storage_latency_seconds_bucket{operation="archive",peer="storage-0",le="+Inf"}': 3,
        'storage_latency_seconds_sum{operation="archive",peer="storage-0"}': 0.25,
        'storage_latency_seconds_count{operation="archive",peer="storage-0"}': 3,
        'dropped_pages_total{operation="write_backup",peer="scheduler",reason="no_host_page"}': 6,
        'dropped_pages_total{operation="archive",peer="scheduler",reason="queue_full"}': 7,
        'corrupt_pages_total{tier="host",peer="gpu_worker-0"}': 1,
        'corrupt_pages_total{tier="storage",peer="storage-0"}': 1,
        'faults_total{kind="load_failed_checksum",peer="scheduler"}': 1,
        'faults_total{kind="backup_failed",peer="scheduler"}': 2,
        'faults_total{kind="peers_lost",peer="scheduler"}': 1,
        'faults_total{kind="storage_read_failed",peer="storage-0"}': 1,
        'messages_dropped_total{reason="stale",peer="gpu_worker-0"}': 2,
        'messages_dropped_total{reason="old_epoch",peer="scheduler"}': 2,
        'engine_steps_total{peer="gpu_worker-0"}': 9,
        'computed_tokens_total{token="given",peer="gpu_worker-0"}': 825,
        'peer_up{role="storage",peer="storage-0"}': 0,
        'peer_silent_seconds{role="storage",peer="storage-0"}': 5,
        'storage_attached{peer="storage-0"}': 0,
        "pages_in_flight": 2,
        "pages_quarantined": 3,
        "nodes_locked": 1,
        "tree_nodes": 7,
        "integrity_ok": 1,
        "scheduler_ready": 1,
        "scheduler_uptime_seconds": 12.5,
    }
    assert {name: samples.get(f"kvtide:{name}") for name in expected} == expected
    assert not [name for name in samples if "cli-" in name]
    assert 'kvtide:transfer_bandwidth_bytes_per_second{operation="load_back",peer="gpu_worker-0"}' not in samples


@pytest.mark.parametrize(
    "status", [{}, {"host": None, "peers": None, "integrity": "page 3"}, {"peers": [{"role": "x"}]}]
)
def test_what_a_status_lacks_has_no_sample(status: dict[str, Any]) -> None:
    samples = [line for line in StatusPage(status).lines() if not line.startswith("#")]
    assert samples == (["kvtide:integrity_ok 0"] if "integrity" in status else [])


async def test_docs_metrics_lists_what_the_gateway_says(stack: Stack) -> None:
    listed = {
        name: (kind, labels) for name, kind, labels, _ in ROW.findall((ROOT / "docs/metrics.md").read_text("utf-8"))
    }
    stack.scheduler.status = json.dumps(STATUS).encode()
    stack.says("abc")
    await stack.complete()
    async with stack.client() as client:
        text = (await client.get("/metrics")).text
    said = {name: kind for name, kind in re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE) if kind != "untyped"}
    assert {name: kind for name, (kind, _) in listed.items()} == said
    for name in parse(text):
        family, _, labels = name.rstrip("}").partition("{")
        family = re.sub(r"_(bucket|sum|count)$", "", family) if said.get(family) is None else family
        shown = [label for label in re.findall(r'(\w+)="', labels) if label != "le"]
        if family in listed:
            assert ", ".join(f"`{label}`" for label in shown) == listed[family][1].strip(), name
    for name, family in FAMILIES.items():
        assert listed[f"kvtide:{name}"][1] == ", ".join(f"`{label}`" for label in family.labels)
