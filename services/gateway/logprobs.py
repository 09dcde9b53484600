"""Log-probabilities in OpenAI's two shapes."""

from typing import Any

from services.gateway.choice import Piece
from services.gateway.vocabulary import Vocabulary, readable

FLOOR = -9999.0  # stands for minus infinity, which JSON doesn't have


def completion_logprobs(piece: Piece, vocabulary: Vocabulary, count: int) -> dict[str, Any]:
    """The legacy shape: four lists. The chosen token is always among `top_logprobs`."""
    entries = piece.entries[: piece.visible]
    names = [readable(vocabulary.token_bytes(entry.scored.token)) for entry in entries]
    values = [_finite(entry.scored.logprob) for entry in entries]
    tops = [
        {readable(vocabulary.token_bytes(token)): _finite(logprob) for token, logprob in entry.scored.top[:count]}
        for entry in entries
    ]
    for name, value, top in zip(names, values, tops, strict=True):
        top.setdefault(name, value)
    return {
        "tokens": names,
        "token_logprobs": values,
        "top_logprobs": tops,
        "text_offset": [entry.offset for entry in entries],
    }


def chat_logprobs(piece: Piece, vocabulary: Vocabulary, count: int) -> dict[str, Any]:
    """The chat shape: one record for each token."""
    return {
        "content": [
            _record(vocabulary, entry.scored.token, entry.scored.logprob)
            | {"top_logprobs": [_record(vocabulary, *top) for top in entry.scored.top[:count]]}
            for entry in piece.entries[: piece.visible]
        ],
        "refusal": None,
    }


def raw_tokens(piece: Piece) -> dict[str, Any]:
    """The extension `return_token_ids`: every token, those of a stop string too."""
    return {
        "token_ids": [entry.scored.token for entry in piece.entries],
        "token_logprobs": [_finite(entry.scored.logprob) for entry in piece.entries],
    }


def _record(vocabulary: Vocabulary, token: int, logprob: float) -> dict[str, Any]:
    data = vocabulary.token_bytes(token)
    return {"token": readable(data), "logprob": _finite(logprob), "bytes": list(data)}


def _finite(logprob: float) -> float:
    return logprob if logprob > FLOOR else FLOOR
