"""POST /v1/chat/completions, also as the official client sees it."""

import asyncio

import httpx
import openai
import pytest

from shared.packed import unpack
from tests.unit.gateway.harness import Stack, events


def prompt_of(stack: Stack, number: int = 0) -> str:
    return stack.words.text(unpack(stack.scheduler.submits[number].tokens))


async def test_whole_answer(stack: Stack) -> None:
    stack.says("hi 😀")
    body = (await stack.chat("yo")).json()
    assert body["object"] == "chat.completion"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hi 😀", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert prompt_of(stack) == "<|im_start|>user\nyo<|im_end|>\n<|im_start|>assistant\n"
    assert body["usage"]["prompt_tokens"] == len(unpack(stack.scheduler.submits[0].tokens))
    assert stack.scheduler.submits[0].max_tokens == 0, "all that fit"


async def test_content_parts_developer_and_nulls(stack: Stack) -> None:
    stack.says("ok")
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "be"}, {"type": "text", "text": "!"}]},
        {"role": "user", "content": "u", "name": "n", "tool_calls": None},
    ]
    response = await stack.post(
        "/v1/chat/completions", {"model": "tiny", "messages": messages, "tools": None, "max_completion_tokens": 3}
    )
    assert response.status_code == 200
    assert prompt_of(stack).startswith("<|im_start|>system\nbe!<|im_end|>\n")
    assert stack.scheduler.submits[0].max_tokens == 3


async def test_stream(stack: Stack) -> None:
    stack.says("hé")
    response = await stack.chat(stream=True, stream_options={"include_usage": True})
    *parts, last = events(response.text)
    deltas = [part["choices"][0]["delta"] for part in parts]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "h"}, {"content": "é"}, {}]
    assert [part["choices"][0]["finish_reason"] for part in parts][-1] == "stop"
    assert all(part["object"] == "chat.completion.chunk" for part in parts)
    assert last["usage"]["completion_tokens"] == 4


async def test_logprobs(stack: Stack) -> None:
    asking = asyncio.create_task(stack.chat(logprobs=True, top_logprobs=2))
    submit = await stack.scheduler.submitted()
    assert submit.sampling.logprobs == 2
    ids = stack.words.ids("é")
    stack.scheduler.emit(submit, ids, {ids[0]: -0.5, stack.words.ids("b")[0]: -1.0})
    stack.scheduler.finish(submit, 2)
    content = (await asking).json()["choices"][0]["logprobs"]["content"]
    top = [
        {"token": "bytes:\\xc3", "logprob": -0.5, "bytes": [0xC3]},
        {"token": "b", "logprob": -1.0, "bytes": [0x62]},
    ]
    assert content == [
        {"token": "bytes:\\xc3", "logprob": -0.5, "bytes": [0xC3], "top_logprobs": top},
        {"token": "bytes:\\xa9", "logprob": -0.5, "bytes": [0xA9], "top_logprobs": top},
    ]


async def test_logprobs_without_top(stack: Stack) -> None:
    stack.says("a")
    parts = events((await stack.chat(logprobs=True, stream=True)).text)
    records = [r for part in parts if (lp := part["choices"][0]["logprobs"]) for r in lp["content"]]
    assert [record["token"] for record in records] == ["a", "<|im_end|>"]
    assert all(record["top_logprobs"] == [] for record in records)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"top_logprobs": 2}, 400, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "critic", "content": "x"}]}, 400, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages[0].content[0].type"),
        ({"messages": [{"role": "user"}]}, 400, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "", "x": 1}]}, 400, "messages[0].x"),
        ({"stream": True, "stream_options": {"x": 1}}, 400, "stream_options.x"),
        ({"messages": [{"role": "user", "content": "forbidden"}]}, 422, "messages"),
        ({"tools": [{"type": "function"}]}, 400, "tools[0].function"),
    ],
)
async def test_refusals(stack: Stack, body: dict, status: int, param: str) -> None:
    response = await stack.chat(**body)
    assert response.status_code == status
    assert response.json()["error"]["param"] == param
    assert not stack.scheduler.submits


async def test_the_official_client(stack: Stack) -> None:
    stack.says("hello 😀")
    async with openai.AsyncOpenAI(
        base_url=f"{stack.url}/v1", api_key="none", max_retries=0, http_client=httpx.AsyncClient(trust_env=False)
    ) as client:
        messages = [{"role": "user", "content": "x"}]
        assert [model.id for model in (await client.models.list()).data] == ["tiny"]
        assert (await client.models.retrieve("tiny")).id == "tiny"
        whole = await client.chat.completions.create(
            model="tiny", messages=messages, logprobs=True, top_logprobs=1, n=2
        )
        assert [choice.message.content for choice in whole.choices] == ["hello 😀"] * 2
        assert whole.usage.prompt_tokens_details.cached_tokens == 0
        stream = await client.chat.completions.create(
            model="tiny", messages=messages, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "hello 😀"
        assert chunks[-1].usage.completion_tokens == 11
        text = await client.completions.create(model="tiny", prompt="x", logprobs=1, extra_body={"top_k": 3})
        assert text.choices[0].text == "hello 😀"
        # Its answer can be sent back as a message.
        again = [*messages, whole.choices[0].message.model_dump(), *messages]
        assert await client.chat.completions.create(model="tiny", messages=again[1:], max_tokens=1)
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="other", messages=messages)
