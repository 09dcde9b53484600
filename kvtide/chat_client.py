"""A client of the gateway that keeps everything a check needs: tokens, logprobs, hits by tier, time to first token."""

import time
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from kvtide.child import StackError
from kvtide.oracle import Emitted

REQUEST_TIMEOUT_S = 180.0  # the slowest request waits behind some twenty others of about 5 s on two cores
DATA, DONE = "data: ", "data: [DONE]"


class RequestError(StackError):
    """A request ended without its answer."""

    def __init__(self, status: int, message: str, retryable: bool) -> None:
        super().__init__(f"request failed with status {status}: {message}")
        self.status = status  # of HTTP; 0 = the connection broke
        self.retryable = retryable


@dataclass
class Answer:
    """One streamed answer."""

    prompt: list[int] = field(default_factory=list)  # token ids
    tokens: list[int] = field(default_factory=list)  # token ids
    logprobs: list[float] = field(default_factory=list)  # natural log
    text: str = ""
    finish: str = ""  # "stop", "length"
    ttft_s: float = 0.0  # from sending the request to the first token
    prompt_tokens: int = 0
    device_tokens: int = 0  # of the prompt, found in the device pool
    host_tokens: int = 0  # of the prompt, found in the host pool
    storage_tokens: int = 0  # of the prompt, found in L3

    @property
    def emitted(self) -> Emitted:
        """For the oracle."""
        return Emitted(self.prompt, self.tokens, self.logprobs)


def client(url: str) -> httpx.AsyncClient:
    """An HTTP client for one gateway, with room for every request at once."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(base_url=url, trust_env=False, timeout=REQUEST_TIMEOUT_S, limits=limits)


async def chat(
    http: httpx.AsyncClient, model: str, messages: list[dict[str, str]], answer: Answer | None = None, **options: Any
) -> Answer:
    """Stream one greedy chat answer, with logprobs and token ids. `options` are added to the body.

    `answer` is filled as tokens come, so that a caller has them even if the request breaks.
    Raises RequestError when it ends any other way than with "stop" or "length".
    """
    return await _stream(http, "/v1/chat/completions", answer or Answer(), model=model, messages=messages, **options)


async def complete(
    http: httpx.AsyncClient, model: str, prompt: str | list[int], answer: Answer | None = None, **options: Any
) -> Answer:
    """The same for a text, or token ids, that is to go on."""
    return await _stream(http, "/v1/completions", answer or Answer(), model=model, prompt=prompt, **options)


async def _stream(http: httpx.AsyncClient, route: str, answer: Answer, **options: Any) -> Answer:
    body = {
        "temperature": 0,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **options,
    }
    started = time.perf_counter()
    try:
        async with http.stream("POST", route, json=body) as response:
            if response.status_code != httpx.codes.OK:
                raise _refused(response.status_code, await response.aread())
            async for line in response.aiter_lines():
                if line.startswith(DATA) and line != DONE:
                    _take(answer, msgspec.json.decode(line.removeprefix(DATA)), started)
    except httpx.TransportError as error:
        raise RequestError(0, repr(error), retryable=True) from None
    if not answer.finish:
        raise RequestError(0, "the stream ended before the answer", retryable=True)
    return answer


def _take(answer: Answer, chunk: dict[str, Any], started: float) -> None:
    if "error" in chunk:
        raise _failed(httpx.codes.OK, chunk["error"])
    answer.prompt = chunk.get("prompt_token_ids") or answer.prompt
    for choice in chunk["choices"]:
        tokens = choice.get("token_ids") or []
        if tokens and not answer.tokens:
            answer.ttft_s = time.perf_counter() - started
        answer.tokens += tokens
        answer.logprobs += choice.get("token_logprobs") or []
        answer.text += choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
        answer.finish = choice.get("finish_reason") or answer.finish
    if usage := chunk.get("usage"):
        answer.prompt_tokens = usage["prompt_tokens"]
        hits = usage.get("prompt_tokens_details") or {}  # absent when the scheduler was restarted meanwhile
        answer.device_tokens = hits.get("device_tokens", 0)
        answer.host_tokens = hits.get("host_tokens", 0)
        answer.storage_tokens = hits.get("storage_tokens", 0)


def _refused(status: int, body: bytes) -> RequestError:
    try:
        return _failed(status, msgspec.json.decode(body)["error"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return RequestError(status, body[:200].decode("utf-8", "replace"), retryable=status in (429, 503))


def _failed(status: int, error: dict[str, Any]) -> RequestError:
    code = str(error.get("code"))
    retryable = status in (429, 503) or (status == httpx.codes.OK and error.get("type") == "server_error")
    return RequestError(status, f"{error.get('message')} ({code})", retryable)
