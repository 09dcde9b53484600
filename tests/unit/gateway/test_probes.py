"""/health, /metrics, /status, /v1/models and API keys."""

import json
import re

import pytest

from tests.unit.gateway.harness import Stack, run_stack, until

SAMPLE = re.compile(r'^[a-zA-Z_:][a-zA-Z0-9_:]*(\{([a-zA-Z_]\w*="[^"]*"(,|(?=\})))+\})? [0-9.e+-]+$')


def parse(text: str) -> dict[str, float]:
    """Prometheus' text format, strictly."""
    assert text.endswith("\n")
    samples = {}
    for line in text.splitlines():
        if line.startswith("#"):
            assert re.match(r"^# (HELP \S+ .+|TYPE \S+ (counter|gauge|histogram|untyped))$", line), line
        else:
            assert SAMPLE.match(line), line
            name, _, value = line.rpartition(" ")
            assert name not in samples
            samples[name] = float(value)
    return samples


async def test_health_follows_the_scheduler(run_folder, model_folder) -> None:
    async with run_stack(run_folder, model_folder, scheduler=False) as stack, stack.client() as client:
        down = await client.get("/health")
        assert (down.status_code, down.json()["status"], down.json()["scheduler"]) == (503, "unavailable", "down")
        assert "scheduler" in down.json()["missing"][0]

        scheduler = await stack.start_scheduler()
        worker = {"identity": "gpu_worker-0", "role": "worker", "up": False}
        storage = {"identity": "storage-0", "role": "storage", "up": True}
        await until(lambda: scheduler.hellos)
        for peers, missing in (
            ([worker, storage], ["gpu_worker-0: it is silent", "worker: none is up"]),
            ([worker | {"up": True}], ["storage: none is up"]),
            ([worker | {"up": True}, storage], ["scheduler: it is not ready yet"]),
        ):
            scheduler.status = json.dumps({"ready": False, "peers": peers}).encode()
            waiting = await client.get("/health")
            assert (waiting.status_code, waiting.json()["missing"]) == (503, missing)

        scheduler.status = b'{"ready": true, "peers": [{"identity": "w"}]}'
        ready = await client.get("/health")
        assert ready.status_code == 200
        assert ready.json() == {
            "status": "ok",
            "missing": [],
            "scheduler": "up",
            "peers": [{"identity": "w"}],
            "model": "tiny",
        }

        scheduler.status = b"{"
        assert (await client.get("/health")).status_code == 503


async def test_status_is_passed_through(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.scheduler_client.STATUS_TIMEOUT_S", 0.1)
    stack.scheduler.status = b'{"ready": true, "anything": [1]}'
    async with stack.client() as client:
        response = await client.get("/status")
        assert (response.status_code, response.content) == (200, stack.scheduler.status)
        stack.scheduler.status = None
        response = await client.get("/status")
        assert (response.status_code, response.json()["error"]["type"]) == (503, "server_error")


async def test_metrics(stack: Stack) -> None:
    stack.scheduler.status = json.dumps(
        {"ready": True, "peers": [], "counters": {"steps": 3, "odd-name": 1.5, "text": "x"}}
    ).encode()
    stack.says("abc")
    await stack.complete()
    await stack.complete(temperature=9)
    async with stack.client() as client:
        await client.get("/v1/unknown")
        response = await client.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    samples = parse(response.text)
    assert samples['kvtide:requests_total{route="/v1/completions",status="200"}'] == 1
    assert samples['kvtide:requests_total{route="/v1/completions",status="400"}'] == 1
    assert samples['kvtide:http_requests_total{route="other",status="404"}'] == 1
    assert samples["kvtide:prompt_tokens_total"] == 5
    assert samples["kvtide:generation_tokens_total"] == 4
    assert samples['kvtide:cached_tokens_total{tier="device"}'] == 0
    assert samples["kvtide:time_to_first_token_seconds_count"] == 1
    assert samples['kvtide:time_to_first_token_seconds_bucket{le="+Inf"}'] == 1
    assert samples["kvtide:e2e_request_latency_seconds_count"] == 1
    assert samples["kvtide:num_requests_open"] == 0
    assert samples["kvtide:scheduler_up"] == 1
    assert samples["kvtide_scheduler_steps"] == 3
    assert samples["kvtide_scheduler_odd_name"] == 1.5
    assert "kvtide_scheduler_text" not in samples


async def test_metrics_without_a_scheduler(run_folder, model_folder) -> None:
    async with run_stack(run_folder, model_folder, scheduler=False) as stack, stack.client() as client:
        assert parse((await client.get("/metrics")).text)["kvtide:scheduler_up"] == 0


async def test_api_keys(run_folder, model_folder) -> None:
    async with run_stack(run_folder, model_folder, keys=("one", "zwei-ü")) as stack, stack.client() as client:
        stack.says("a")
        for headers in (
            {},
            {"Authorization": "Bearer three"},
            {"Authorization": "Basic one"},
            {"Authorization": "one"},
        ):
            for path in ("/v1/models", "/status", "/unknown"):
                response = await client.get(path, headers=headers)
                assert response.status_code == 401
                assert response.json()["error"]["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"
        assert (await client.post("/v1/completions", json={})).status_code == 401
        for path in ("/health", "/metrics"):
            assert (await client.get(path)).status_code == 200
        for key in (b"Bearer one", "bearer zwei-ü".encode()):
            assert (await client.get("/v1/models", headers={b"Authorization": key})).status_code == 200


async def test_models(stack: Stack) -> None:
    async with stack.client() as client:
        listed = (await client.get("/v1/models")).json()
        assert listed["object"] == "list"
        assert [card["id"] for card in listed["data"]] == ["tiny"]
        assert (await client.get("/v1/models/tiny")).json() == listed["data"][0]
