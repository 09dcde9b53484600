"""Every way in which a request is refused, in OpenAI's shape."""

import asyncio

import pytest

from shared.messages.gateway import Emission, EmitTokens
from shared.packed import pack
from tests.unit.gateway.harness import CONTEXT, Stack

UNSUPPORTED = {
    "best_of": 2,
    "echo": True,
    "suffix": "x",
}

BAD_PARAMETERS = [
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": 2.5}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": -0.1}, "min_p"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": CONTEXT}, "max_tokens"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"n": 9, "prompt": ["a", "b"]}, "n"),
    ({"seed": 2**64}, "seed"),
    ({"logprobs": 6}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"stop": ["a"] * 5}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": "x" * 513}, "stop"),
    ({"stop": 7}, "stop"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [260]}, "prompt"),
    ({"prompt": [[1], [2.5]]}, "prompt"),
    ({"prompt": ["a"] * 17}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"model": None}, "model"),
    ({"frequency_penalty": 2.5}, "frequency_penalty"),
    ({"presence_penalty": -3}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"260": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"cache_salt": "x" * 257}, "cache_salt"),
    ({"priority": 2**31}, "priority"),
    ({"banana": 1}, "banana"),
    ({"max_completion_tokens": 4}, "max_completion_tokens"),
    ({"store": 0}, "store"),  # to Python these equal what is taken
    ({"store": 0.0}, "store"),
    ({"echo": 0}, "echo"),
    ({"best_of": True}, "best_of"),
    *(({name: value}, name) for name, value in UNSUPPORTED.items()),
]


def error_of(response, status: int) -> dict:
    assert response.status_code == status, response.text
    body = response.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


async def test_a_bad_parameter_is_named(stack: Stack) -> None:
    for body, param in BAD_PARAMETERS:
        error = error_of(await stack.complete(**body), 400)
        assert error["param"] == param, body
        assert error["type"] == "invalid_request_error"
        assert param in error["message"]
    assert not stack.scheduler.submits


async def test_harmless_parameters_are_taken(stack: Stack) -> None:
    stack.says("a")
    harmless = {
        "user": "u",
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "best_of": 1,
        "echo": False,
        "suffix": None,
    }
    assert (await stack.complete(logit_bias={}, presence_penalty=0.0, **harmless)).status_code == 200


async def test_a_prompt_longer_than_the_context_names_both_numbers(stack: Stack) -> None:
    error = error_of(await stack.complete(prompt="x" * 100), 400)
    assert error["code"] == "context_length_exceeded"
    assert "100 tokens" in error["message"]
    assert f"{CONTEXT} tokens" in error["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"3", b"\xff", b'{"temperature": NaN}', b'"\\ud800"'])
async def test_a_body_that_is_no_json_object(stack: Stack, body: bytes) -> None:
    async with stack.client() as client:
        assert error_of(await client.post("/v1/completions", content=body), 400)["code"] == "invalid_json"


@pytest.mark.parametrize("announced", [True, False])
async def test_a_body_that_is_too_large(stack: Stack, announced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.http.MAX_BODY_BYTES", 1000)

    async def chunks():
        for _ in range(20):
            yield b" " * 100

    async with stack.client() as client:
        content = b" " * 2000 if announced else chunks()
        assert error_of(await client.post("/v1/completions", content=content), 413)["code"] == "body_too_large"


async def test_a_body_that_never_comes(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.http.BODY_TIMEOUT_S", 0.1)

    async def nothing():
        yield b"{"
        await asyncio.sleep(1)
        yield b"}"

    async with stack.client() as client:
        error_of(await client.post("/v1/completions", content=nothing()), 408)


async def test_unknown_model_route_and_method(stack: Stack) -> None:
    error = error_of(await stack.complete(model="gpt"), 404)
    assert error["code"] == "model_not_found"
    assert "'tiny'" in error["message"]
    async with stack.client() as client:
        assert error_of(await client.get("/v1/models/gpt"), 404)["code"] == "model_not_found"
        assert "/v1/nothing" in error_of(await client.get("/v1/nothing"), 404)["message"]
        error_of(await client.get("/v1/models/"), 404)
        error_of(await client.post("/v1/embeddings", json={}), 404)
        response = await client.get("/v1/completions")
        assert error_of(response, 405)["code"] == "method_not_allowed"
        assert response.headers["allow"] == "POST"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("code", "retry", "kind", "after"),
    [
        (400, False, "invalid_request_error", None),
        (400, True, "invalid_request_error", None),
        (429, True, "rate_limit_error", "1"),
        (503, True, "server_error", "2"),
        (503, False, "server_error", None),
        (7, False, "server_error", None),
    ],
)
async def test_reject(stack: Stack, stream: bool, code: int, retry: bool, kind: str, after: str | None) -> None:
    asking = asyncio.create_task(stack.complete(stream=stream))
    stack.scheduler.reject(await stack.scheduler.submitted(), code, "the queue is full: wait", retry)
    response = await asking
    error = error_of(response, code if code >= 400 else 500)
    assert (error["type"], error["message"]) == (kind, "the queue is full: wait")
    assert response.headers.get("retry-after") == after
    assert stack.scheduler.aborts == []


async def test_reject_in_the_middle_of_a_stream(stack: Stack) -> None:
    asking = asyncio.create_task(stack.complete(stream=True))
    submit = await stack.scheduler.submitted()
    stack.scheduler.emit(submit, stack.words.ids("a"))
    await asyncio.sleep(0.1)
    stack.scheduler.reject(submit, 503, "the worker was lost: send it again", True)
    text = (await asking).text
    assert '"the worker was lost: send it again"' in text.splitlines()[-2]
    assert "[DONE]" not in text


async def test_one_rejected_choice_ends_the_others(stack: Stack) -> None:
    asking = asyncio.create_task(stack.complete(n=3))
    await stack.scheduler.submitted(3)
    stack.scheduler.reject(stack.scheduler.submits[1], 429, "full", True)
    error_of(await asking, 429)
    await asyncio.sleep(0.1)
    ids = [submit.request_id for submit in stack.scheduler.submits]
    assert sorted(stack.scheduler.aborts) == sorted([ids[0], ids[2]])


async def test_too_many_open_requests(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.records.MAX_OPEN_REQUESTS", 1)
    first = asyncio.create_task(stack.complete())
    submit = await stack.scheduler.submitted()
    response = await stack.complete()
    assert error_of(response, 429)["code"] == "overloaded"
    assert response.headers["retry-after"] == "1"
    stack.scheduler.finish(submit, 0)
    assert (await first).status_code == 200
    stack.says("a")
    assert (await stack.complete()).status_code == 200


async def test_a_malformed_emission_ends_its_request_alone(stack: Stack) -> None:
    asking = asyncio.create_task(stack.complete())
    submit = await stack.scheduler.submitted()
    stack.scheduler.emit(submit, [1, 2], {1: -1.0})
    broken = stack.words.ids("a")
    stack.scheduler.send(EmitTokens([Emission(submit.request_id, pack(broken), b"", [], [])]))
    error_of(await asking, 500)
    stack.says("a")
    assert (await stack.complete()).status_code == 200


async def test_a_client_that_is_too_far_behind(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.session.MAX_PENDING_EVENTS", 2)
    asking = asyncio.create_task(stack.complete())
    submit = await stack.scheduler.submitted()
    one = Emission(submit.request_id, pack([1]), b"\0\0\0\0", [], [])
    stack.scheduler.send(EmitTokens([one] * 5))
    assert "too slowly" in error_of(await asking, 503)["message"]
    await asyncio.sleep(0.1)
    assert stack.scheduler.aborts == [submit.request_id]


async def test_no_text_in_the_log(stack: Stack, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "kvtide")
    stack.says("secret answer")
    await stack.complete(prompt="secret prompt")
    await stack.chat("secret chat", stream=True)
    await stack.complete(prompt="secret prompt", temperature="secret")
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("request ")]
    assert len(lines) == 3
    assert "route=/v1/completions status=200 finish=stop prompt_tokens=13 device=0 host=0 storage=0" in lines[0]
    assert "secret" not in caplog.text
