"""Penalties, biases and grammars: what moves a row's logits before a token is chosen.

All of it follows from the guide and the tokens so far, which every step brings along: a request that was retracted,
restarted or sent to another worker goes on as if nothing had happened.
"""

from typing import NamedTuple

import numpy as np

from services.gpu_worker.sampling import Adjust, Row
from services.gpu_worker.sampling_grammar import Grammars
from shared.errors import ProtocolError
from shared.messages.worker import Guide
from shared.packed import Ints, unpack

HIGHEST = (
    1e30  # logit: a penalty near 0 would make it infinite; the coldest temperature still divides it within float32
)


class SoFar(NamedTuple):
    """The tokens before the one that is chosen, as far back as a guide looks."""

    start: int  # position of the first of them
    tokens: Ints

    def output(self, guide: Guide) -> Ints:
        """Those that the model has made."""
        return self.tokens[max(0, guide.output_start - self.start) :]


def adjustment(row: int, guide: Guide, so_far: SoFar, grammars: Grammars) -> Adjust:
    """The function that moves the logits (float32 [vocab], in place) of a row of req_to_token.

    Order: repetition penalty, frequency and presence penalty, biases, grammar; as in vLLM. Raises ProtocolError for a
    malformed guide.
    """
    biased, biases = unpack(guide.biased_tokens), np.frombuffer(guide.biases, dtype="<f4")
    if len(biased) != len(biases):
        raise ProtocolError(f"{len(biased)} biased tokens have {len(biases)} biases")
    if guide.grammar and not guide.end_tokens:
        raise ProtocolError("a grammar needs tokens that end it")

    def adjust(logits: Row) -> Row:
        if guide.repetition_penalty != 1:
            _repetition(logits, so_far.tokens, guide.repetition_penalty)
        output = so_far.output(guide)
        if guide.presence_penalty or guide.frequency_penalty:
            tokens, counts = np.unique(output, return_counts=True)
            logits[tokens] -= guide.frequency_penalty * counts.astype(np.float32) + guide.presence_penalty
        np.add.at(logits, biased, biases)
        if guide.grammar:
            allowed = grammars.allowed(row, guide, output, len(logits))
            logits[~allowed] = -np.inf
        return logits

    return adjust


def _repetition(logits: Row, tokens: Ints, penalty: float) -> None:
    """Keskar and others, 2019 (CTRL): a positive logit is divided by the penalty, a negative one multiplied."""
    seen = np.unique(tokens)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):  # the other branch, and what is cut below
        moved = np.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
    logits[seen] = np.minimum(moved, HIGHEST)
