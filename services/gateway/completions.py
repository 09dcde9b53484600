"""POST /v1/completions: text or tokens go on."""

from typing import Any

from services.gateway.choice import Piece
from services.gateway.errors import invalid
from services.gateway.job import Job, check_model, check_tokens, make_job, tokenize
from services.gateway.limits import DEFAULT_MAX_TOKENS, MAX_CHOICES
from services.gateway.logprobs import completion_logprobs, raw_tokens
from services.gateway.model import Model
from services.gateway.parameters import decode
from services.gateway.requests import CompletionRequest


class Completions:
    """See `services.gateway.shape.Shape`."""

    whole = chunk = "text_completion"

    def __init__(self, model: Model) -> None:
        self._model = model

    async def job(self, body: bytes) -> Job:
        """Decode, check and tokenize. Raises ApiError."""
        request = decode(body, CompletionRequest)
        check_model(request, self._model)
        return make_job(
            request,
            self._model,
            await self._prompts(request.prompt),
            prefix="cmpl",
            logprobs=request.logprobs,
            max_tokens=request.max_tokens or DEFAULT_MAX_TOKENS,
        )

    def opening(self, index: int) -> None:
        """A completion begins with its text."""

    def delta(self, job: Job, index: int, piece: Piece) -> list[dict[str, Any]]:
        """One event."""
        return [self.choice(job, index, piece)]

    def choice(self, job: Job, index: int, piece: Piece) -> dict[str, Any]:
        """A piece, or all of them."""
        logprobs = None
        if job.logprobs is not None:
            logprobs = completion_logprobs(piece, self._model.vocabulary, job.logprobs)
        choice = {"index": index, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish_reason}
        return choice | raw_tokens(piece) if job.return_token_ids else choice

    async def _prompts(self, prompt: str | list[Any]) -> list[list[int]]:
        """A text, a list of token ids, or a list of either: then each is a prompt of its own."""
        if isinstance(prompt, str):
            return [await self._tokens(prompt)]
        if not prompt:
            raise invalid("the prompt is an empty list: send some text", "prompt")
        if not isinstance(prompt[0], str | list):
            return [check_tokens(prompt, self._model)]
        if len(prompt) > MAX_CHOICES:
            raise invalid(f"{len(prompt)} prompts are more than {MAX_CHOICES}: send them in several requests", "prompt")
        return [await self._tokens(one) for one in prompt]

    async def _tokens(self, prompt: object) -> list[int]:
        if isinstance(prompt, str):
            return await tokenize(prompt, self._model, add_special_tokens=True)
        if isinstance(prompt, list):
            return check_tokens(prompt, self._model)
        raise invalid(
            "the prompt must be a string, a list of strings, token ids, or a list of token id lists", "prompt"
        )
