"""POST /v1/chat/completions: a conversation goes on."""

from typing import Any

from services.gateway.chat_template import ChatTemplate
from services.gateway.choice import Piece
from services.gateway.errors import invalid
from services.gateway.grammar import GrammarChecker
from services.gateway.job import Job, check_model, make_job, offload, tokenize
from services.gateway.logprobs import chat_logprobs, raw_tokens
from services.gateway.model import Model
from services.gateway.parameters import decode
from services.gateway.requests import ChatMessage, ChatRequest, Tool
from services.gateway.tools import CallRules, answer_grammar, offered, render


class Chat:
    """See `services.gateway.shape.Shape`."""

    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def __init__(self, model: Model, grammars: GrammarChecker) -> None:
        self._model = model
        self._grammars = grammars

    async def job(self, body: bytes) -> Job:
        """Decode, check, render and tokenize. Raises ApiError."""
        request = decode(body, ChatRequest)
        check_model(request, self._model)
        if request.top_logprobs is not None and not request.logprobs:
            raise invalid("top_logprobs needs logprobs: set logprobs to true or remove it", "top_logprobs")
        tools = offered(request)
        template, prompt = await conversation(request.messages, tools, len(body), self._model)
        grammar, param = answer_grammar(request, tools, template.notation)
        if grammar:
            await self._grammars.check(grammar, param)
        return make_job(
            request,
            self._model,
            [prompt],
            prefix="chatcmpl",
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            max_tokens=request.max_completion_tokens or request.max_tokens,
            grammar=grammar,
            calls=CallRules(template.notation, frozenset(tool.function.name for tool in tools)) if tools else None,
        )

    def opening(self, index: int) -> dict[str, Any]:
        """The role comes before any text."""
        return _event(index, {"role": "assistant", "content": ""}, None)

    def delta(self, job: Job, index: int, piece: Piece) -> list[dict[str, Any]]:
        """The text, then, in an event of its own, the end."""
        events = []
        asked = job.logprobs is not None or job.return_token_ids
        if piece.text or (asked and piece.entries):
            event = _event(index, {"content": piece.text}, None)
            event["logprobs"] = self._logprobs(job, piece)
            events.append(event | raw_tokens(piece) if job.return_token_ids else event)
        events += [_event(index, {"tool_calls": [{"index": call.index} | call.body()]}, None) for call in piece.calls]
        if piece.finish_reason is not None:
            events.append(_event(index, {}, piece.finish_reason))
        return events

    def choice(self, job: Job, index: int, piece: Piece) -> dict[str, Any]:
        """The whole message."""
        choice = {
            "index": index,
            "message": _message(piece),
            "logprobs": self._logprobs(job, piece),
            "finish_reason": piece.finish_reason,
        }
        return choice | raw_tokens(piece) if job.return_token_ids else choice

    def _logprobs(self, job: Job, piece: Piece) -> dict[str, Any] | None:
        return None if job.logprobs is None else chat_logprobs(piece, self._model.vocabulary, job.logprobs)


async def conversation(
    messages: list[ChatMessage], tools: list[Tool], size: int, model: Model
) -> tuple[ChatTemplate, list[int]]:
    """The template and the tokens that it makes of a conversation of `size` bytes. Raises ApiError."""
    template = model.chat_template
    if template is None:
        raise invalid("the model has no chat template: use /v1/completions", "messages")
    text = await offload(size, lambda: render(messages, tools, template))
    return template, await tokenize(text, model, add_special_tokens=False)


def _message(piece: Piece) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": piece.text, "refusal": None}
    if piece.calls:
        message |= {"content": piece.text or None, "tool_calls": [call.body() for call in piece.calls]}
    return message


def _event(index: int, delta: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
