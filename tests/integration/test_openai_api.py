"""The parameters that change what is sampled, on the real model: penalties, biases, schemas, tools, and retraction."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pydantic
import pytest
import pytest_asyncio

from kvtide.stack import Stack
from tests.integration.harness import prompt, settle

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.integration]

TIMEOUT_S = 100.0
CROWD = 3  # requests at once: their prompts nearly fill the device
LONG = 80  # tokens of output, with which they outgrow it
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "size": {"enum": ["small", "large"]},
        "people": {"type": "integer", "minimum": 0, "maximum": 99999},
    },
    "required": ["city", "size", "people"],
    "additionalProperties": False,
}
COLOURS = {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 15, "maxItems": 15}  # 100 tokens or so
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"$ref": "#/$defs/unit"}},
            "required": ["city", "unit"],
            "additionalProperties": False,
            "$defs": {"unit": {"enum": ["celsius", "fahrenheit"]}},
        },
    },
}
TIME = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}


class Weather(pydantic.BaseModel):
    """What a user of the official client writes."""

    city: str = pydantic.Field(max_length=12)
    degrees: int = pydantic.Field(ge=0, le=60)


@pytest_asyncio.fixture(loop_scope="session")
async def http(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    """A plain client."""
    async with httpx.AsyncClient(base_url=stack.url, timeout=TIMEOUT_S, trust_env=False) as made:
        yield made


async def complete(http: httpx.AsyncClient, stack: Stack, text: str, **options: Any) -> dict[str, Any]:
    body = {"model": stack.config.model.name, "prompt": text, "temperature": 0, "return_token_ids": True, **options}
    response = await http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def chat_body(http: httpx.AsyncClient, stack: Stack, question: str, **options: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    body = {"model": stack.config.model.name, "messages": messages, "temperature": 0, **options}
    response = await http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def chat(http: httpx.AsyncClient, stack: Stack, question: str, **options: Any) -> dict[str, Any]:
    return (await chat_body(http, stack, question, **options))["choices"][0]


def longest_repeat(tokens: list[int]) -> int:
    """How often the commonest token comes."""
    return max(Counter(tokens).values())


async def test_penalties_and_biases_change_what_is_said(http: httpx.AsyncClient, stack: Stack) -> None:
    text = "the cat the cat the cat the cat the"
    plain = (await complete(http, stack, text, max_tokens=24))["choices"][0]["token_ids"]
    assert longest_repeat(plain) > 4
    for penalty in ({"frequency_penalty": 2.0}, {"presence_penalty": 2.0}, {"repetition_penalty": 1.8}):
        moved = (await complete(http, stack, text, max_tokens=24, **penalty))["choices"][0]["token_ids"]
        assert longest_repeat(moved) < longest_repeat(plain), penalty
    forced = (await complete(http, stack, text, max_tokens=3, logit_bias={"100": 100}))["choices"][0]
    assert forced["token_ids"] == [100] * 3
    banned = await complete(http, stack, text, max_tokens=1, logit_bias={str(plain[0]): -100})
    assert banned["choices"][0]["token_ids"][0] != plain[0]


@pytest.mark.parametrize("temperature", [0, 1.5])
async def test_a_schema_is_followed(http: httpx.AsyncClient, stack: Stack, temperature: float) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
    answers = await asyncio.gather(
        *(
            chat(http, stack, "Tell me of Paris.", response_format=form, max_tokens=90, temperature=temperature, seed=n)
            for n in range(3)
        )
    )
    for answer in answers:
        assert answer["finish_reason"] == "stop"
        value = json.loads(answer["message"]["content"])
        assert list(value) == ["city", "size", "people"]
        assert value["size"] in ("small", "large")
        assert 0 <= value["people"] <= 99999


async def test_a_json_object_is_an_object(http: httpx.AsyncClient, stack: Stack) -> None:
    answer = await chat(
        http, stack, "List two colours as JSON.", response_format={"type": "json_object"}, max_tokens=200
    )
    if answer["finish_reason"] == "stop":
        assert isinstance(json.loads(answer["message"]["content"]), dict)
    assert answer["message"]["content"].lstrip().startswith("{")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
async def test_a_forced_call_is_made(http: httpx.AsyncClient, stack: Stack, choice: Any) -> None:
    tools = [WEATHER] if choice == "required" else [TIME, WEATHER]
    answer = await chat(
        http,
        stack,
        "How warm is it in Rome?",
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=False,
        max_tokens=120,
    )
    assert answer["finish_reason"] == "tool_calls", answer
    assert answer["message"]["content"] is None
    (call,) = answer["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"])["unit"] in ("celsius", "fahrenheit")


async def test_the_official_client_parses_and_streams_calls(stack: Stack) -> None:
    name = stack.config.model.name
    question = [{"role": "user", "content": "How warm is it in Rome?"}]
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S) as api:
        parsed = await api.chat.completions.parse(
            model=name,
            messages=question,
            response_format=Weather,
            max_tokens=60,
            temperature=0,
            n=2,
            presence_penalty=0.1,
        )
        assert all(isinstance(choice.message.parsed, Weather) for choice in parsed.choices)
        assert len(parsed.choices) == 2
        deltas = []
        async for chunk in await api.chat.completions.create(
            model=name, messages=question, tools=[WEATHER], tool_choice="required", max_tokens=200, stream=True, seed=1
        ):
            deltas += [choice.delta for choice in chunk.choices]
        calls = [call for delta in deltas for call in delta.tool_calls or []]
        assert [call.index for call in calls] == list(range(len(calls)))
        assert calls
        assert {call.function.name for call in calls} == {"get_weather"}


LOGGING = ("gateway", "scheduler")


async def test_a_request_can_be_followed_through_the_logs(http: httpx.AsyncClient, stack: Stack) -> None:
    answer = await complete(http, stack, "hello", max_tokens=2)
    for service in LOGGING:
        lines = await asyncio.to_thread(wait_for_lines, stack, service, answer["id"])
        assert len(lines) == 1, f"{service} says {len(lines)} times how request {answer['id']} ended"


def wait_for_lines(stack: Stack, service: str, request_id: str) -> list[str]:
    """A line is written after its answer is sent."""
    deadline = time.monotonic() + TIMEOUT_S
    while not (lines := lines_about(stack, service, request_id)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return lines


def lines_about(stack: Stack, service: str, request_id: str) -> list[str]:
    logs = (stack.config.run_folder / "logs").glob(f"{service}*")
    return [line for file in logs for line in file.read_text().splitlines() if request_id in line]


@pytest.mark.timeout(300)  # six long answers: beside other work they take minutes
async def test_guided_requests_survive_retraction(http: httpx.AsyncClient, stack: Stack) -> None:
    """A retracted request comes back with prompt and output in one: penalties and grammars must see the same tokens."""
    texts = [prompt(number) for number in range(CROWD)]
    penalties = {"repetition_penalty": 1.3, "frequency_penalty": 0.7, "presence_penalty": 0.2}

    async def ask(number: int, salt: str) -> tuple[Any, int]:
        if number:
            body = await complete(
                http, stack, texts[number], cache_salt=salt, max_tokens=LONG, ignore_eos=True, **penalties
            )
            return body["choices"][0]["token_ids"], body["kvtide"]["retracted"]
        form = {"type": "json_schema", "json_schema": {"name": "list", "schema": COLOURS}}
        body = await chat_body(http, stack, texts[0], cache_salt=salt, max_tokens=2 * LONG, response_format=form)
        return json.loads(body["choices"][0]["message"]["content"]), body["kvtide"]["retracted"]

    alone = [await ask(number, "alone") for number in range(CROWD)]
    crowd = await asyncio.gather(*(ask(number, "crowd") for number in range(CROWD)))
    assert sum(retracted for _, retracted in crowd) > 0, "the device was never short: nothing was tried"
    assert [answer for answer, _ in crowd] == [answer for answer, _ in alone]
    await settle(stack)
