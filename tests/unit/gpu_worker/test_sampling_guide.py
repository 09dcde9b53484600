"""Penalties, biases and grammars: the formulas, and that nothing but the tokens so far decides."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from services.gpu_worker.sampling import COLDEST, sample
from services.gpu_worker.sampling_grammar import MAX_GRAMMARS, Grammars
from services.gpu_worker.sampling_guide import SoFar, adjustment
from shared.errors import ProtocolError
from shared.messages.worker import Guide, Sampling
from shared.packed import pack

VOCABULARY = 260
END = 256
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"enum": ["x", "é"]}, "maxItems": 3}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOKENS = st.lists(st.integers(0, VOCABULARY - 1), max_size=30)


def guide(**changes: Any) -> Guide:
    plain = {
        "looks_from": 0,
        "output_start": 0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "biased_tokens": b"",
        "biases": b"",
        "grammar": "",
        "end_tokens": b"",
    }
    return Guide(**{**plain, **changes})


def json_guide(schema: dict[str, Any]) -> Guide:
    grammar = LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})
    return guide(grammar=grammar, end_tokens=pack([END]))


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every byte is a token; 256 ends."""
    vocab = {char: n for n, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    file = tmp_path_factory.mktemp("tokens") / "tokenizer.json"
    tokenizer.save(str(file))
    return file


def moved(logits: np.ndarray, wanted: Guide, tokens: list[int], start: int = 0) -> np.ndarray:
    so_far = SoFar(start, np.array(tokens, dtype=np.int32))
    return adjustment(1, wanted, so_far, Grammars(Path("unused")))(logits.copy())


@given(prompt=TOKENS, output=TOKENS, presence=st.floats(-2, 2), frequency=st.floats(-2, 2), repeat=st.floats(0.5, 2))
def test_the_formulas(prompt: list[int], output: list[int], presence: float, frequency: float, repeat: float) -> None:
    logits = np.random.default_rng(len(prompt)).normal(size=VOCABULARY).astype(np.float32) * 5
    wanted = guide(
        output_start=len(prompt),
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repeat,
        biased_tokens=pack([7, 9]),
        biases=np.array([3.5, -100], dtype="<f4").tobytes(),
    )
    expected = logits.astype(np.float64)
    for token in range(VOCABULARY):
        if token in prompt or token in output:
            expected[token] *= repeat if expected[token] < 0 else 1 / repeat
        count = output.count(token)
        expected[token] -= frequency * count + presence * (count > 0)
    expected[7] += 3.5
    expected[9] -= 100
    assert moved(logits, wanted, prompt + output) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("penalty", [1e-44, 5e-324])  # the second is 0 in float32
def test_a_penalty_near_nothing_leaves_finite_logits_that_can_be_drawn_from(penalty: float) -> None:
    logits = np.linspace(-20, 20, VOCABULARY, dtype=np.float32)
    loud = moved(logits, guide(repetition_penalty=penalty), [VOCABULARY - 1, VOCABULARY - 2, 0])
    assert np.isfinite(loud).all()
    coldest = Sampling(COLDEST * 2, 1.0, 0, 0.1, 0, 0, 0)
    (drawn,) = sample(torch.from_numpy(logits)[None], [coldest], [0], {0: lambda _: loud})
    assert drawn.token_id in (VOCABULARY - 1, VOCABULARY - 2)


@given(prompt=TOKENS, output=TOKENS, looks_from=st.integers(0, 40))
def test_where_the_step_begins_does_not_matter(prompt: list[int], output: list[int], looks_from: int) -> None:
    """A first prefill brings the prompt and no history; a decode brings history and one token."""
    logits = np.zeros(VOCABULARY, dtype=np.float32)
    begin = min(looks_from, len(prompt))
    wanted = guide(looks_from=begin, output_start=len(prompt), frequency_penalty=1.0)
    tokens = prompt + output
    whole = moved(logits, wanted, tokens)
    assert whole.tolist() == moved(logits, wanted, tokens[begin:], begin).tolist()


def test_a_bias_moves_a_greedy_choice_and_no_logprob() -> None:
    logits = torch.randn(2, VOCABULARY, generator=torch.Generator().manual_seed(0))
    biased = guide(biased_tokens=pack([5]), biases=np.array([100], dtype="<f4").tobytes())
    adjust = adjustment(1, biased, SoFar(0, np.array([1], dtype=np.int32)), Grammars(Path("unused")))
    greedy = Sampling(0.0, 1.0, 0, 0.0, 0, 0, 0)
    before = logits.clone()
    first, second = sample(logits, [greedy, greedy], [1, 1], {1: adjust})
    assert first.token_id == int(logits[0].argmax())
    assert second.token_id == 5
    assert second.logprob == pytest.approx(float(logits[1].log_softmax(-1)[5]), abs=1e-5)
    assert torch.equal(before, logits)


def write_json(tokenizer_file: Path, schema: dict[str, Any], seed: int, restart: float) -> bytes:
    """Random tokens that the grammar allows, the worker's memory lost with the probability `restart` before each."""
    dice, wanted = random.Random(seed), json_guide(schema)
    grammars, output = Grammars(tokenizer_file), []
    for position in range(400):
        if dice.random() < restart:
            grammars = Grammars(tokenizer_file)
        so_far = SoFar(0, np.array(output, dtype=np.int32))
        row = dice.randrange(1, 4) if restart else 1
        logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(1000 * seed + position))
        sampling = Sampling(1.0, 1.0, 0, 0.0, seed, 0, 0, wanted)
        token = sample(logits, [sampling], [position], {0: adjustment(row, wanted, so_far, grammars)})[0].token_id
        if token == END:
            break
        output.append(token)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return decoders.ByteLevel().decode([alphabet[token] for token in output]).encode()


@settings(max_examples=15)
@given(seed=st.integers(0, 2**31))
def test_any_sampling_under_a_schema_gives_json_whatever_is_forgotten(tokenizer_file: Path, seed: int) -> None:
    text = write_json(tokenizer_file, SCHEMA, seed, restart=0.2)
    assert text == write_json(tokenizer_file, SCHEMA, seed, restart=0.0)
    value = json.loads(text)
    assert list(value) == ["a", "b"]
    assert set(value["b"]) <= {"x", "é"}


def allowed(grammars: Grammars, wanted: Guide, output: list[int], row: int = 1) -> list[int]:
    return grammars.allowed(row, wanted, np.array(output, dtype=np.int32), VOCABULARY).nonzero()[0].tolist()


def test_a_broken_grammar_or_impossible_output_ends_the_answer(tokenizer_file: Path) -> None:
    grammars = Grammars(tokenizer_file)
    assert allowed(grammars, guide(grammar="start: nothing", end_tokens=pack([END])), []) == [END]
    assert allowed(grammars, json_guide(SCHEMA), [0, 0, 0]) == [END]
    with pytest.raises(ProtocolError, match="end"):
        adjustment(1, guide(grammar="x"), SoFar(0, np.array([], dtype=np.int32)), grammars)


def test_what_is_kept_is_bounded(tokenizer_file: Path) -> None:
    grammars = Grammars(tokenizer_file)
    for number in range(MAX_GRAMMARS + 5):
        assert allowed(grammars, json_guide({"const": number}), [], row=number) != [END]
    assert len(grammars._compiled) == MAX_GRAMMARS
