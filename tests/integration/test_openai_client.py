"""OpenAI's own client, unmodified, against a running stack."""

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest
import pytest_asyncio

from kvtide.stack import Stack
from tests.integration.harness import settle

pytestmark = pytest.mark.asyncio(loop_scope="session")

STREAMS = 20
TIMEOUT_S = 90.0
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest_asyncio.fixture(loop_scope="session")
async def client(stack: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    """The client as a user makes it."""
    async with openai.AsyncOpenAI(
        base_url=f"{stack.url}/v1", api_key="unused", max_retries=0, timeout=TIMEOUT_S
    ) as made:
        yield made


@pytest.fixture
def model(stack: Stack) -> str:
    """The served model's name."""
    return stack.config.model.name


async def test_models_are_listed(client: openai.AsyncOpenAI, model: str) -> None:
    assert [each.id async for each in client.models.list()] == [model]


async def test_chat(client: openai.AsyncOpenAI, model: str) -> None:
    answer = await client.chat.completions.create(model=model, messages=QUESTION, max_tokens=12, temperature=0)
    choice = answer.choices[0]
    assert "Paris" in (choice.message.content or "")
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 12
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens is not None


async def test_a_streamed_chat_says_the_same(client: openai.AsyncOpenAI, model: str) -> None:
    whole = await client.chat.completions.create(model=model, messages=QUESTION, max_tokens=8, temperature=0)
    text, usage, finish = "", None, None
    async for chunk in await client.chat.completions.create(
        model=model,
        messages=QUESTION,
        max_tokens=8,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    assert text == whole.choices[0].message.content
    assert finish == whole.choices[0].finish_reason
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


async def test_completion_whole_and_streamed(client: openai.AsyncOpenAI, model: str) -> None:
    options = {"model": model, "prompt": "The capital of France is", "max_tokens": 6, "temperature": 0}
    whole = await client.completions.create(**options)
    assert whole.choices[0].text.startswith(" Paris")
    text = ""
    async for chunk in await client.completions.create(**options, stream=True):
        text += "".join(choice.text for choice in chunk.choices)
    assert text == whole.choices[0].text


async def test_logprobs(client: openai.AsyncOpenAI, model: str) -> None:
    answer = await client.chat.completions.create(
        model=model, messages=QUESTION, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert answer.usage is not None
    assert len(logprobs.content) == answer.usage.completion_tokens
    for entry in logprobs.content:
        assert entry.logprob <= 0.0
        assert len(entry.top_logprobs) == 3
        # Greedy: the chosen token is the best one.
        assert entry.top_logprobs[0].token == entry.token
        assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob, abs=1e-4)


async def test_stop_ends_before_its_text(client: openai.AsyncOpenAI, model: str) -> None:
    options = {"model": model, "prompt": "One, two, three, four,", "max_tokens": 24, "temperature": 0}
    whole = (await client.completions.create(**options)).choices[0].text
    stop = whole[4:8]
    cut = (await client.completions.create(**options, stop=[stop])).choices[0]
    assert cut.text == whole[: whole.index(stop)]
    assert cut.finish_reason == "stop"


async def test_a_seed_repeats_a_sampled_answer(client: openai.AsyncOpenAI, model: str) -> None:
    options = {"model": model, "messages": QUESTION, "max_tokens": 8, "temperature": 0.8, "top_p": 0.9, "seed": 7}
    first = await client.chat.completions.create(**options)
    second = await client.chat.completions.create(**options)
    assert first.choices[0].message.content == second.choices[0].message.content


async def test_twenty_streams_at_once(client: openai.AsyncOpenAI, model: str, stack: Stack) -> None:
    async def count(number: int) -> int:
        chunks = 0
        async for chunk in await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": f"Say something about the number {number}."}],
            max_tokens=6,
            temperature=0,
            stream=True,
        ):
            chunks += any(choice.delta.content for choice in chunk.choices)
        return chunks

    counts = await asyncio.gather(*(count(number) for number in range(STREAMS)))
    assert len(counts) == STREAMS
    assert all(counts)
    await settle(stack)


async def test_a_cancelled_stream_leaves_nothing(client: openai.AsyncOpenAI, model: str, stack: Stack) -> None:
    stream = await client.chat.completions.create(
        model=model, messages=QUESTION, max_tokens=500, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    async for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            break
    await stream.close()
    status = await settle(stack)
    assert status["requests"]["open"] == 0


async def test_errors_are_openai_errors(client: openai.AsyncOpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(model="another", messages=QUESTION)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        await client.chat.completions.create(model=model, messages=QUESTION, temperature=3.0)
