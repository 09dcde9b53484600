"""A request's penalties, biases and grammar as the worker takes them."""

from dataclasses import dataclass

import numpy as np

from services.gateway.errors import invalid
from services.gateway.model import Model
from services.gateway.requests import GenerateRequest
from shared.messages.worker import Guide
from shared.packed import pack

NOWHERE = 2**31 - 1  # no request has so many tokens: looking from there is looking at none


@dataclass(frozen=True)
class GuideParts:
    """What all choices of a request have in common."""

    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    biases: dict[int, float]
    grammar: str
    end_tokens: tuple[int, ...]

    def guide(self, prompt_tokens: int) -> Guide | None:
        """For a prompt of so many tokens; None when the logits stay as they are."""
        counts_output = bool(self.presence_penalty or self.frequency_penalty or self.grammar)
        looks_back = counts_output or self.repetition_penalty != 1
        if not (looks_back or self.biases):
            return None
        looks_from = (0 if self.repetition_penalty != 1 else prompt_tokens) if looks_back else NOWHERE
        return Guide(
            looks_from=looks_from,
            output_start=prompt_tokens,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            biased_tokens=pack(self.biases),
            biases=np.array(list(self.biases.values()), dtype="<f4").tobytes(),
            grammar=self.grammar,
            end_tokens=pack(self.end_tokens),
        )


def guide_parts(request: GenerateRequest, model: Model, grammar: str) -> GuideParts:
    """Raises ApiError 400 for what makes no sense."""
    if grammar and request.ignore_eos:
        raise invalid("ignore_eos excludes response_format and forced calls, which end by themselves", "ignore_eos")
    repetition = request.repetition_penalty
    if repetition is None:
        repetition = model.defaults.repetition_penalty or 1.0
    return GuideParts(
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=repetition,
        biases=_biases(request.logit_bias, model),
        grammar=grammar,
        end_tokens=tuple(model.stop_token_ids) if grammar else (),
    )


def _biases(given: dict[str, float], model: Model) -> dict[int, float]:
    biases: dict[int, float] = {}
    for text, bias in given.items():
        token = int(text) if text.isascii() and text.isdecimal() and len(text) <= len(str(model.vocab_size)) else -1
        if not 0 <= token < model.vocab_size:
            raise invalid(
                f"{text!r} in logit_bias is no token id: those are integers from 0 to {model.vocab_size - 1}",
                "logit_bias",
            )
        biases[token] = bias
    return biases
