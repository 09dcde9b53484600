"""POST /v1/chat/completions: a conversation goes on."""

from typing import Any

from services.gateway.choice import Piece
from services.gateway.errors import invalid
from services.gateway.job import Job, check_model, make_job, offload, tokenize
from services.gateway.logprobs import chat_logprobs, raw_tokens
from services.gateway.model import Model
from services.gateway.parameters import decode
from services.gateway.requests import ChatMessage, ChatRequest


class Chat:
    """See `services.gateway.shape.Shape`."""

    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def __init__(self, model: Model) -> None:
        self._model = model

    async def job(self, body: bytes) -> Job:
        """Decode, check, render and tokenize. Raises ApiError."""
        request = decode(body, ChatRequest)
        check_model(request, self._model)
        if request.top_logprobs is not None and not request.logprobs:
            raise invalid("top_logprobs needs logprobs: set logprobs to true or remove it", "top_logprobs")
        template = self._model.chat_template
        if template is None:
            raise invalid("the model has no chat template: use /v1/completions", "messages")
        messages = [_plain(message) for message in request.messages]
        size = sum(len(message["content"]) for message in messages)
        text = await offload(size, lambda: template.render(messages))
        return make_job(
            request,
            self._model,
            [await tokenize(text, self._model, add_special_tokens=False)],
            prefix="chatcmpl",
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            max_tokens=request.max_completion_tokens or request.max_tokens,
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
        if piece.finish_reason is not None:
            events.append(_event(index, {}, piece.finish_reason))
        return events

    def choice(self, job: Job, index: int, piece: Piece) -> dict[str, Any]:
        """The whole message."""
        choice = {
            "index": index,
            "message": {"role": "assistant", "content": piece.text, "refusal": None},
            "logprobs": self._logprobs(job, piece),
            "finish_reason": piece.finish_reason,
        }
        return choice | raw_tokens(piece) if job.return_token_ids else choice

    def _logprobs(self, job: Job, piece: Piece) -> dict[str, Any] | None:
        return None if job.logprobs is None else chat_logprobs(piece, self._model.vocabulary, job.logprobs)


def _event(index: int, delta: dict[str, str], finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def _plain(message: ChatMessage) -> dict[str, str]:
    """As templates expect it. OpenAI's "developer" is what models have learned as "system"."""
    content = message.content if isinstance(message.content, str) else "".join(part.text for part in message.content)
    plain = {"role": "system" if message.role == "developer" else message.role, "content": content}
    return plain | {"name": message.name} if message.name else plain
