"""The explanation of an answer: on request in the answer, later by its id."""

from typing import Any

import pytest
from msgspec import json as msgjson

from services.gateway.why_words import CAUSES, OF_REASON, REASONS, words
from tests.unit.gateway.harness import Stack, events

SEGMENT = {
    "from_token": 0,
    "to_token": 4,
    "tier": "host",
    "missed": {"device": {"reason": "evicted", "cause": "admission", "request_id": "cmpl-a-0-0", "seconds_ago": 2.5}},
}
RECOMPUTED = {"device": 0, "host": 0, "storage": 0, "any": 0}


def explain(stack: Stack, tier: str = "host") -> None:
    """The scheduler knows every request that is submitted from now on."""
    tokens = stack.words.ids("x")

    def answer(submit: Any) -> list[int]:
        about = {"request_id": submit.request_id, "prompt_tokens": 5, "page_size": 4, "recomputed_tokens": RECOMPUTED}
        stack.scheduler.explanations[submit.request_id] = about | {"segments": [SEGMENT | {"tier": tier}]}
        return tokens

    stack.scheduler.answer = answer


async def test_an_answer_explains_itself_on_request_only(stack: Stack) -> None:
    explain(stack)
    plain = (await stack.complete(max_tokens=1)).json()
    assert set(plain["kvtide"]) == {"queue_s", "retracted"}
    body = (await stack.complete(max_tokens=1, kvtide_explain=True, n=2)).json()
    first, second = body["kvtide"]["explanation"]
    assert (first["choice"], second["choice"]) == (0, 1)
    fate = first["segments"][0]["missed"]["device"]
    assert fate["request_id"] == "cmpl-a"
    assert fate["text"] == "evicted 2.5 s earlier: to admit cmpl-a"


@pytest.mark.parametrize("usage", [False, True])
async def test_the_last_chunk_of_a_stream_explains(stack: Stack, usage: bool) -> None:
    explain(stack)
    options = {"stream_options": {"include_usage": True}} if usage else {}
    chunks = events((await stack.chat(stream=True, max_tokens=1, kvtide_explain=True, **options)).text)
    assert chunks[-1]["choices"] == []
    assert ("usage" in chunks[-1]) == usage
    assert chunks[-1]["kvtide"]["explanation"][0]["segments"][0]["tier"] == "host"
    assert not any("kvtide" in chunk for chunk in chunks[:-1])


async def test_a_scheduler_that_knows_nothing_leaves_the_explanation_null(stack: Stack) -> None:
    stack.says("x")
    body = (await stack.complete(max_tokens=1, kvtide_explain=True)).json()
    assert body["kvtide"]["explanation"] is None


async def test_why_by_id(stack: Stack) -> None:
    explain(stack)
    answer = await stack.complete(max_tokens=1)
    async with stack.client() as client:
        found = await client.get(f"/kvtide/why/{answer.headers['x-request-id']}")
        assert found.status_code == 200
        assert found.json()["id"] == answer.json()["id"]
        assert found.json()["choices"][0]["segments"][0]["missed"]["device"]["reason"] == "evicted"


async def test_the_last_attempt_counts(stack: Stack) -> None:
    about = {"prompt_tokens": 5, "page_size": 4, "recomputed_tokens": RECOMPUTED}
    for attempt, tier in ((0, "device"), (1, "computed")):
        name = f"cmpl-x-0-{attempt}"
        stack.scheduler.explanations[name] = about | {"request_id": name, "segments": [SEGMENT | {"tier": tier}]}
    async with stack.client() as client:
        (choice,) = (await client.get("/kvtide/why/cmpl-x")).json()["choices"]
    assert choice["segments"][0]["tier"] == "computed"


@pytest.mark.parametrize("asked", ["cmpl-unknown", "cmpl", "x" * 3000])
async def test_an_unknown_id_is_404_and_says_which_ids_are_known(stack: Stack, asked: str) -> None:
    explain(stack)
    await stack.complete(max_tokens=1)
    async with stack.client() as client:
        found = await client.get(f"/kvtide/why/{asked}")
    assert found.status_code == 404
    assert "one of the last 1,024 answers" in found.json()["error"]["message"]
    assert found.json()["error"]["code"] == "unknown_request"


async def test_without_a_scheduler_it_is_503(stack: Stack) -> None:
    stack.scheduler.silent = True
    async with stack.client() as client:
        found = await client.get("/kvtide/why/cmpl-x")
    assert found.status_code == 503
    assert msgjson.decode(found.content)["error"]["code"] == "unavailable"


def test_every_reason_has_words_and_no_cause_is_left_in_code() -> None:
    from typing import get_args

    from services.scheduler.core.ghosts import Reason

    assert set(get_args(Reason)) - {"stored"} <= set(REASONS)
    assert words({"reason": "dropped", "cause": "archive_queue"}) == "not kept: the queue to L3 was full"
    assert words({"reason": "failed", "cause": "prefetch"}) == "a copy failed: L3 could not be read"
    assert not [text for text in (*CAUSES.values(), *OF_REASON.values()) if text.endswith(".")]
