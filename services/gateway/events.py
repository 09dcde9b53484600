"""What the scheduler tells of one choice."""

from typing import NamedTuple

import numpy as np

from services.gateway.errors import ApiError
from shared.errors import ProtocolError
from shared.messages.gateway import Emission, Usage
from shared.packed import unpack


class Scored(NamedTuple):
    """A token with natural logs of the raw distribution."""

    token: int
    logprob: float
    top: list[tuple[int, float]]  # best first


class Tokens(NamedTuple):
    """New tokens."""

    tokens: list[Scored]


class Finished(NamedTuple):
    """The scheduler is done with the choice; `usage` is None when it can't say any more."""

    reason: str
    usage: Usage | None


class Failed(NamedTuple):
    """The choice ends without an answer, and with it the whole request."""

    error: ApiError


Event = Tokens | Finished | Failed


def unpack_emission(emission: Emission) -> Tokens:
    """Raises ProtocolError when the emission's lists don't fit each other."""
    tokens, logprobs = unpack(emission.tokens).tolist(), _floats(emission.logprobs)
    ids, values = emission.top_ids or [b""] * len(tokens), emission.top_logprobs or [b""] * len(tokens)
    if not len(tokens) == len(logprobs) == len(ids) == len(values):
        raise ProtocolError(f"an emission of {len(tokens)} tokens has {len(logprobs)} logprobs, {len(ids)} top lists")
    tops = [_pairs(top, logs) for top, logs in zip(ids, values, strict=True)]
    return Tokens([Scored(*each) for each in zip(tokens, logprobs, tops, strict=True)])


def _pairs(ids: bytes, logprobs: bytes) -> list[tuple[int, float]]:
    if len(ids) != len(logprobs):
        raise ProtocolError(f"{len(ids) // 4} top tokens have {len(logprobs) // 4} logprobs")
    return list(zip(unpack(ids).tolist(), _floats(logprobs), strict=True))


def _floats(data: bytes) -> list[float]:
    if len(data) % 4:
        raise ProtocolError(f"a packed float32 list can't have {len(data)} bytes")
    values: list[float] = np.frombuffer(data, dtype="<f4").tolist()
    return values
