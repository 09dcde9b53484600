"""POST /v1/completions: streamed and whole."""

import asyncio

import pytest

from shared.packed import unpack
from tests.unit.gateway.harness import CONTEXT, Stack, events

EMOJI = "a😀é"


async def test_whole_answer_with_usage_by_tier(stack: Stack) -> None:
    asking = asyncio.create_task(stack.complete(max_tokens=9))
    submit = await stack.scheduler.submitted()
    stack.scheduler.emit(submit, stack.words.ids("hi"))
    stack.scheduler.finish(submit, 2, "length", hits=(3, 1, 0))
    response = await asking
    body = response.json()
    assert response.status_code == 200
    assert body["object"] == "text_completion"
    assert body["model"] == "tiny"
    assert response.headers["x-request-id"] == body["id"]
    assert body["choices"] == [{"index": 0, "text": "hi", "logprobs": None, "finish_reason": "length"}]
    assert body["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 4, "device_tokens": 3, "host_tokens": 1, "storage_tokens": 0},
    }
    assert body["kvtide"] == {"queue_s": 0.25, "retracted": 1}


async def test_submit_carries_the_request(stack: Stack) -> None:
    stack.says("x")
    await stack.complete(
        max_tokens=7, temperature=0, top_p=0.5, top_k=-1, min_p=0.1, seed=-1, cache_salt="s", priority=-3, user="u"
    )
    submit = stack.scheduler.submits[0]
    assert unpack(submit.tokens).tolist() == stack.words.ids("hello")
    assert (submit.max_tokens, submit.priority, submit.namespace.tenant) == (7, -3, "s")
    assert submit.stop_token_ids == [stack.words.end]
    sampling = submit.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0, 0.5, 0, 0.1)
    assert (sampling.seed, sampling.choice, sampling.logprobs) == (2**63 - 1, 0, 0)
    assert 599 < submit.timeout_s <= 600


async def test_defaults(stack: Stack) -> None:
    stack.says("x")
    await stack.complete()
    await stack.complete(ignore_eos=True)
    first, second = stack.scheduler.submits
    assert (first.max_tokens, first.sampling.temperature, first.sampling.top_p) == (16, 1.0, 1.0)
    assert first.sampling.seed != second.sampling.seed
    assert second.stop_token_ids == []


@pytest.mark.parametrize("stream", [False, True])
async def test_an_emoji_over_four_tokens_is_never_broken(stack: Stack, stream: bool) -> None:
    stack.says(EMOJI)
    response = await stack.complete(stream=stream)
    if not stream:
        choice = response.json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (EMOJI, "stop")
        return
    texts = [event["choices"][0]["text"] for event in events(response.text)]
    assert [text for text in texts if text] == list(EMOJI)


async def test_an_unfinished_character_at_the_end_is_replaced_once(stack: Stack) -> None:
    ids = stack.words.ids("a😀")[:3]
    stack.scheduler.answer = lambda submit: ids
    response = await stack.complete(max_tokens=3, stream=True)
    assert "".join(event["choices"][0]["text"] for event in events(response.text)) == "a�"


@pytest.mark.parametrize("finish_aborted", [True, False])
@pytest.mark.parametrize("stream", [False, True])
async def test_stop_string_across_tokens(stack: Stack, stream: bool, finish_aborted: bool) -> None:
    stack.scheduler.finish_aborted = finish_aborted
    stack.scheduler.pace_s = 0.01
    ids = stack.words.ids("one EN two END three")
    stack.scheduler.answer = lambda submit: ids
    response = await stack.complete(
        max_tokens=30, stream=stream, stop=["END", "never"], stream_options={"include_usage": True} if stream else None
    )
    submit = stack.scheduler.submits[0]
    assert stack.scheduler.aborts == [submit.request_id]
    if stream:
        *parts, last = events(response.text)
        assert "".join(part["choices"][0]["text"] for part in parts) == "one EN two "
        assert [part["choices"][0]["finish_reason"] for part in parts if part["choices"][0]["finish_reason"]] == [
            "stop"
        ]
        usage = last["usage"]
    else:
        choice = response.json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("one EN two ", "stop")
        usage = response.json()["usage"]
    assert usage["completion_tokens"] == len("one EN two END")
    hits = {"cached_tokens": 7, "device_tokens": 4, "host_tokens": 2, "storage_tokens": 1}
    assert usage.get("prompt_tokens_details") == (hits if finish_aborted else None)


async def test_a_beginning_of_a_stop_string_that_comes_to_nothing_is_shown(stack: Stack) -> None:
    stack.says("say EN")
    response = await stack.complete(stop="END", stream=True)
    assert "".join(event["choices"][0]["text"] for event in events(response.text)) == "say EN"


async def test_stream_without_and_with_usage(stack: Stack) -> None:
    stack.says("ab")
    plain = events((await stack.complete(stream=True)).text)
    assert all("usage" not in event for event in plain)
    response = await stack.complete(stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    *parts, last = events(response.text)
    assert all(part["usage"] is None for part in parts)
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 5 + 3
    assert len({event["id"] for event in parts}) == 1


async def test_continuous_usage_counts_with_the_text(stack: Stack) -> None:
    stack.says("ab")
    options = {"include_usage": True, "continuous_usage_stats": True}
    *parts, last = events((await stack.complete(stream=True, stream_options=options)).text)
    counted = [part["usage"]["completion_tokens"] for part in parts]
    assert counted == sorted(counted)
    assert 1 <= counted[0] <= counted[-1] == last["usage"]["completion_tokens"] == 3
    assert {part["usage"]["prompt_tokens"] for part in parts} == {5}
    alone = events((await stack.complete(stream=True, stream_options={"continuous_usage_stats": True})).text)
    assert all("usage" not in event for event in alone)


async def test_logprobs_in_the_legacy_shape(stack: Stack) -> None:
    asking = asyncio.create_task(stack.complete(logprobs=2))
    submit = await stack.scheduler.submitted()
    assert submit.sampling.logprobs == 2
    a, b, c = stack.words.ids("abc")
    stack.scheduler.emit(submit, [a], {a: -0.5, b: -1.5}, -0.5)
    stack.scheduler.emit(submit, [c], {a: -0.5, b: float("-inf")}, -3.0)
    stack.scheduler.finish(submit, 2, "length")
    logprobs = (await asking).json()["choices"][0]["logprobs"]
    assert logprobs == {
        "tokens": ["a", "c"],
        "token_logprobs": [-0.5, -3.0],
        "top_logprobs": [{"a": -0.5, "b": -1.5}, {"a": -0.5, "b": -9999.0, "c": -3.0}],
        "text_offset": [0, 1],
    }


async def test_streamed_logprobs_come_with_their_text_and_never_show_a_stop_string(stack: Stack) -> None:
    ids = stack.words.ids("é.ENDx")
    stack.scheduler.answer = lambda submit: ids
    response = await stack.complete(logprobs=0, stream=True, stop="END", return_token_ids=True)
    choices = [event["choices"][0] for event in events(response.text)]
    shown = [(choice["text"], choice["logprobs"]["tokens"], choice["token_ids"]) for choice in choices]
    assert shown == [
        ("é", ["bytes:\\xc3", "bytes:\\xa9"], ids[:2]),
        (".", ["."], ids[2:3]),
        ("", [], ids[3:6]),
    ]
    assert choices[1]["logprobs"]["text_offset"] == [1]


async def test_return_token_ids(stack: Stack) -> None:
    stack.says("ab")
    whole = (await stack.complete(return_token_ids=True)).json()
    assert whole["prompt_token_ids"] == stack.words.ids("hello")
    assert whole["choices"][0]["token_ids"] == [*stack.words.ids("ab"), stack.words.end]
    assert whole["choices"][0]["token_logprobs"] == [-0.5] * 3
    parts = events((await stack.complete(return_token_ids=True, stream=True)).text)
    assert parts[0]["prompt_token_ids"] == stack.words.ids("hello")
    assert "prompt_token_ids" not in parts[1]
    assert [id for part in parts for id in part["choices"][0]["token_ids"]] == whole["choices"][0]["token_ids"]


async def test_prompt_forms_and_choices(stack: Stack) -> None:
    stack.scheduler.answer = lambda submit: [unpack(submit.tokens).tolist()[0], stack.words.end]
    ids = stack.words.ids("xyz")
    assert (await stack.complete(prompt=ids)).json()["choices"][0]["text"] == "x"
    for prompt in (["ab", "cd"], [stack.words.ids("ab"), stack.words.ids("cd")]):
        body = (await stack.complete(prompt=prompt, n=2)).json()
        assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "a"), (1, "a"), (2, "c"), (3, "c")]
        assert body["usage"]["prompt_tokens"] == 4
        assert body["usage"]["completion_tokens"] == 8
    assert [submit.sampling.choice for submit in stack.scheduler.submits[-4:]] == [0, 1, 0, 1]
    parts = events((await stack.complete(prompt="ab", n=2, stream=True)).text)
    assert {part["choices"][0]["index"] for part in parts} == {0, 1}


async def test_a_long_prompt_is_tokenized_beside_the_loop(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.job.THREAD_CHARS", 3)
    stack.says("ok")
    assert (await stack.complete()).json()["choices"][0]["text"] == "ok"
    assert (await stack.chat()).json()["choices"][0]["message"]["content"] == "ok"


async def test_twenty_streams_at_once(stack: Stack) -> None:
    stack.scheduler.answer = lambda submit: [*unpack(submit.tokens).tolist(), stack.words.end]
    prompts = [f"stream {n} 😀" for n in range(20)]
    responses = await asyncio.gather(*(stack.complete(prompt=prompt, stream=True, max_tokens=40) for prompt in prompts))
    for prompt, response in zip(prompts, responses, strict=True):
        assert "".join(event["choices"][0]["text"] for event in events(response.text)) == prompt
    assert stack.scheduler.aborts == []


async def test_keep_alive_comments_while_waiting(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.answer.KEEP_ALIVE_S", 0.05)
    asking = asyncio.create_task(stack.complete(stream=True))
    submit = await stack.scheduler.submitted()
    await asyncio.sleep(0.2)
    stack.scheduler.emit(submit, stack.words.ids("a"))
    stack.scheduler.finish(submit, 1)
    text = (await asking).text
    assert text.startswith(": keep-alive\n\n")
    assert events(text)[0]["choices"][0]["text"] == "a"


async def test_max_tokens_fills_the_context_exactly(stack: Stack) -> None:
    stack.says("a", end=False)
    assert (await stack.complete(max_tokens=CONTEXT - 5)).status_code == 200
    response = await stack.complete(max_tokens=CONTEXT - 4)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert f"at most {CONTEXT - 5}" in error["message"]
