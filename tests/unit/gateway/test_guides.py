"""Penalties, biases and formats: what reaches the worker, and what is refused with its reason."""

from typing import Any

import numpy as np
import pytest

from services.gateway.limits import MAX_SCHEMA_BYTES
from shared.packed import unpack
from tests.unit.gateway.harness import Stack


def deep(levels: int) -> dict:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def form(schema: dict) -> dict:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}}


async def test_a_plain_request_has_no_guide(stack: Stack) -> None:
    stack.says("a")
    await stack.complete(presence_penalty=0, logit_bias={}, repetition_penalty=1)
    assert stack.scheduler.submits[0].sampling.guide is None


async def test_what_reaches_the_worker(stack: Stack) -> None:
    stack.says("a")
    await stack.complete(presence_penalty=0.5, frequency_penalty=-1, logit_bias={"7": 2, "9": -100}, n=2)
    for number in range(2):
        guide = stack.scheduler.submits[number].sampling.guide
        assert (guide.presence_penalty, guide.frequency_penalty, guide.repetition_penalty) == (0.5, -1, 1)
        assert guide.looks_from == guide.output_start == 5
        assert unpack(guide.biased_tokens).tolist() == [7, 9]
        assert np.frombuffer(guide.biases, "<f4").tolist() == [2, -100]
    await stack.complete(repetition_penalty=1.2)
    assert stack.scheduler.submits[2].sampling.guide.looks_from == 0
    await stack.complete(logit_bias={"7": 2})
    assert stack.scheduler.submits[3].sampling.guide.looks_from == 2**31 - 1


async def test_formats_become_grammars(stack: Stack) -> None:
    stack.says("{}")
    assert (await stack.chat(response_format={"type": "text"})).status_code == 200
    assert stack.scheduler.submits[0].sampling.guide is None
    assert (await stack.chat(response_format={"type": "json_object"})).status_code == 200
    guide = stack.scheduler.submits[1].sampling.guide
    assert '"type":"object"' in guide.grammar.replace(" ", "")
    assert unpack(guide.end_tokens).tolist() == [stack.words.end]
    assert (await stack.chat(**form({"enum": [1, 2]}))).status_code == 200


def forced(schema: dict) -> dict:
    """A request that must call a function of these parameters."""
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    return {"tools": [tool], "tool_choice": "required"}


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (form({"type": "objekt"}), "response_format", "objekt"),
        (form({"$ref": "#/definitions/x"}), "response_format", "/definitions/x"),
        (form({"$ref": "http://127.0.0.1:1/x"}), "response_format", "does not fetch"),
        (form({"type": "string", "pattern": "("}), "response_format", "unclosed"),
        (form({"not": {"type": "string"}}), "response_format", "not"),
        (form({"type": "integer", "minimum": 3, "maximum": 2}), "response_format", "greater than maximum"),
        (form({"$ref": "#"}), "response_format", "no text"),
        (form({"minimum": 10**400}), "response_format", "out of range"),
        (forced({"minimum": 10**400}), "tools", "out of range"),
        (form({"enum": ["x" * MAX_SCHEMA_BYTES]}), "response_format", "larger than"),
        (form(deep(70)), "response_format", "deep"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos", "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "json_schema"),
    ],
)
async def test_refusals(stack: Stack, body: dict, param: str, words: str) -> None:
    response = await stack.chat(**body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert words in error["message"]
    assert not stack.scheduler.submits


async def test_a_body_that_nests_without_end_is_refused(stack: Stack) -> None:
    async with stack.client() as client:
        response = await client.post("/v1/completions", content=b"[" * 100_000)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_json"


async def test_a_grammar_that_the_worker_gave_up_is_no_answer(stack: Stack) -> None:
    """The worker ends the answer where it can't go on: what stands there is no JSON."""
    stack.says('{"a": ')
    response = await stack.chat(response_format={"type": "json_object"})
    assert response.status_code == 422
    assert response.json()["error"]["code"] == "grammar_failed"
    stack.says('{"a": ', end=False)
    assert (await stack.chat(response_format={"type": "json_object"})).json()["choices"][0]["finish_reason"] == "length"
