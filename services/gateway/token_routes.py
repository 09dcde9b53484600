"""POST /tokenize and POST /detokenize: the model's tokens without the model. Shapes as in vLLM."""

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.types import Receive, Scope, Send

from services.gateway.chat import conversation
from services.gateway.errors import ClientGone, invalid, json_response
from services.gateway.http import read_body
from services.gateway.job import check_tokens, offload, tokenize, unknown_model
from services.gateway.model import Model
from services.gateway.parameters import decode
from services.gateway.requests import DetokenizeRequest, TokenizeRequest
from services.gateway.vocabulary import readable


class JsonRoute:
    """ASGI application of a POST route that answers one body with another."""

    def __init__(self, answer: Callable[[bytes], Awaitable[dict[str, Any]]]) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, unless the client leaves first."""
        try:
            body = await read_body(scope, receive)
        except ClientGone:
            return
        await json_response(await self._answer(body))(scope, receive, send)


class TokenRoutes:
    """Between text and tokens."""

    def __init__(self, model: Model) -> None:
        self._model = model

    async def tokenize(self, body: bytes) -> dict[str, Any]:
        """Token ids of a text or a conversation."""
        request = decode(body, TokenizeRequest)
        self._check_model(request.model)
        if request.messages is not None and request.prompt is None:
            _, tokens = await conversation(request.messages, request.tools, len(body), self._model)
        elif request.prompt is not None and request.messages is None:
            tokens = await tokenize(request.prompt, self._model, request.add_special_tokens)
        else:
            raise invalid("send either prompt or messages", "prompt")
        answer: dict[str, Any] = {"count": len(tokens), "max_model_len": self._model.context, "tokens": tokens}
        if request.return_token_strs:
            answer["token_strs"] = [readable(self._model.vocabulary.token_bytes(token)) for token in tokens]
        return answer

    async def detokenize(self, body: bytes) -> dict[str, Any]:
        """The text of token ids, special ones included."""
        request = decode(body, DetokenizeRequest)
        self._check_model(request.model)
        tokens = check_tokens(request.tokens, self._model, "tokens")
        vocabulary = self._model.vocabulary
        data = await offload(len(tokens), lambda: b"".join(vocabulary.token_bytes(token) for token in tokens))
        return {"prompt": data.decode(errors="replace")}

    def _check_model(self, asked: str | None) -> None:
        if asked not in (None, self._model.name):
            raise unknown_model(str(asked), self._model.name)
