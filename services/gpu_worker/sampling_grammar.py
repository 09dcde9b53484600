"""Which tokens a grammar allows next, through llguidance. What is kept here saves time and decides nothing."""

import logging
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from shared.messages.worker import Guide
from shared.packed import Ints, unpack

MAX_GRAMMARS = 32  # compiled grammars kept: one takes 1 to 100 ms to compile and up to some MB
MAX_MATCHERS = 64  # rows whose place in their grammar is kept; four times the default's running requests

Mask = npt.NDArray[np.bool_]

log = logging.getLogger("kvtide.grammar")


@dataclass
class _Place:
    """How far into its grammar a row has come."""

    grammar: str
    matcher: LLMatcher
    consumed: Ints


class Grammars:
    """Grammars of one model's tokens. Runs on the compute stream's thread only."""

    def __init__(self, tokenizer_file: Path) -> None:
        """tokenizer_file: the model's tokenizer.json; it is read when the first grammar comes."""
        self._file = tokenizer_file
        self._tokenizers: dict[tuple[int, bytes], LLTokenizer] = {}  # by vocabulary size and end tokens
        self._compiled: OrderedDict[tuple[str, int, bytes], LLMatcher] = OrderedDict()  # at their beginning
        self._places: OrderedDict[int, _Place] = OrderedDict()  # by row

    def allowed(self, row: int, guide: Guide, output: Ints, vocabulary: int) -> Mask:
        """bool [vocabulary]: the tokens that may follow `output`; at least one end token when nothing else may.

        A grammar that can't be followed (the gateway refuses those it can tell) ends the answer: one bad grammar must
        not fail the step of all other requests.
        """
        matcher = self._matcher(row, guide, output, vocabulary)
        mask = np.zeros(vocabulary, dtype=np.bool_)
        if not matcher.is_stopped():
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
            mask[:] = bits[:vocabulary]
        ends = unpack(guide.end_tokens)
        if matcher.is_error():
            log.warning("grammar_failed row=%d output_tokens=%d", row, len(output))
            mask[:] = False
        if matcher.is_accepting() or not mask.any():
            mask[ends] = True
        return mask

    def _matcher(self, row: int, guide: Guide, output: Ints, vocabulary: int) -> LLMatcher:
        """The row's matcher after `output`: the one of its last step when that fits, else a new one."""
        place = self._places.get(row)
        if place is None or not _continues(place, guide.grammar, output):
            place = _Place(guide.grammar, self._compile(guide, vocabulary).deep_copy(), output[:0])
        self._places[row] = place
        self._places.move_to_end(row)
        if len(self._places) > MAX_MATCHERS:
            self._places.popitem(last=False)
        fresh = output[len(place.consumed) :]
        if len(fresh):
            place.matcher.consume_tokens(fresh.tolist())
            place.consumed = output.copy()
        return place.matcher

    def _compile(self, guide: Guide, vocabulary: int) -> LLMatcher:
        key = (guide.grammar, vocabulary, guide.end_tokens)
        if key not in self._compiled:
            self._compiled[key] = LLMatcher(self._tokenizer(vocabulary, guide.end_tokens), guide.grammar, log_level=0)
        self._compiled.move_to_end(key)
        if len(self._compiled) > MAX_GRAMMARS:
            self._compiled.popitem(last=False)
        return self._compiled[key]

    def _tokenizer(self, vocabulary: int, ends: bytes) -> LLTokenizer:
        key = (vocabulary, ends)
        if key not in self._tokenizers:
            text = self._file.read_text(encoding="utf-8")
            self._tokenizers = {key: LLTokenizer(text, n_vocab=vocabulary, eos_token=unpack(ends).tolist())}
        return self._tokenizers[key]


def _continues(place: _Place, grammar: str, output: Ints) -> bool:
    done = len(place.consumed)
    return place.grammar == grammar and done <= len(output) and bool(np.array_equal(place.consumed, output[:done]))
