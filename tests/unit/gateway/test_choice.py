"""However the tokens come, the pieces that are streamed are the text that isn't."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.choice import Choice, Piece, join
from services.gateway.events import Scored
from services.gateway.guides import GuideParts
from services.gateway.job import Job
from services.gateway.tool_calls import HERMES
from services.gateway.tools import CallRules
from services.gateway.vocabulary import Vocabulary
from shared.messages.gateway import Namespace
from shared.messages.worker import Sampling
from tests.unit.gateway.harness import Words

NO_GUIDE = GuideParts(0.0, 0.0, 1.0, {}, "", ())
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
TEXTS = st.lists(st.sampled_from(["a", "b", "ab", "é", "😀", "\n ", CALL, "<tool_"]) | st.text(max_size=4), max_size=10)
STOPS = st.lists(st.text(alphabet="abé😀", min_size=1, max_size=3), max_size=3)
SIZES = st.lists(st.integers(1, 7), max_size=60)


def job(stream: bool, **changes: Any) -> Job:
    plain = {
        "id": "x",
        "created": 0,
        "model": "m",
        "prompts": [[1]],
        "max_tokens": [99],
        "n": 1,
        "sampling": Sampling(0.0, 1.0, 0, 0.0, 0, 0, 0),
        "guide": NO_GUIDE,
        "calls": None,
        "logprobs": None,
        "stops": [],
        "stop_token_ids": [],
        "namespace": Namespace(),
        "priority": 0,
        "stream": stream,
        "include_usage": False,
        "continuous_usage": False,
        "return_token_ids": True,
        "explain": False,
    }
    return Job(**{**plain, **changes})


def play(choice: Choice, ids: list[int], sizes: list[int]) -> list[Piece]:
    """The pieces for tokens that come `sizes` at a time, then one at a time."""
    pieces, rest = [], [Scored(token, -0.5, []) for token in ids]
    for size in [*sizes, *[1] * len(rest)]:
        if rest and not choice.done:
            pieces.append(choice.take(rest[:size]))
            rest = rest[size:]
    if not choice.done:
        pieces.append(choice.finish("length"))
    return pieces


@pytest.fixture(scope="session")
def vocabulary(model_folder: Path) -> Vocabulary:
    return Vocabulary(Words(model_folder).tokenizer, model_folder / "tokenizer.json")


@pytest.fixture(scope="session")
def byte_tokens(vocabulary: Vocabulary) -> dict[int, int]:
    return {vocabulary.token_bytes(token)[0]: token for token in range(256)}


@given(parts=TEXTS, stops=STOPS, sizes=SIZES, tools=st.booleans())
def test_a_stream_adds_up_to_the_whole_answer(
    vocabulary: Vocabulary,
    byte_tokens: dict[int, int],
    parts: list[str],
    stops: list[str],
    sizes: list[int],
    tools: bool,
) -> None:
    text = "".join(parts)
    ids = [byte_tokens[byte] for byte in text.encode()]
    calls = CallRules(HERMES, frozenset({"f"})) if tools else None
    streamed = join(play(Choice(job(True, stops=stops, calls=calls), vocabulary), ids, sizes))
    whole_choice = Choice(job(False, stops=stops, calls=calls), vocabulary)
    play(whole_choice, ids, [len(ids)] if ids else [])
    whole = join(whole_choice.pieces)
    assert streamed.text == whole.text
    assert streamed.finish_reason == whole.finish_reason
    assert [(call.name, call.index) for call in streamed.calls] == [(call.name, call.index) for call in whole.calls]
    if not tools:
        assert streamed.text == before_stop(text, stops)
    got = [entry.scored.token for entry in streamed.entries]
    assert got == ids[: len(got)], "tokens are lost or out of order"
    if streamed.finish_reason == "length":
        assert got == ids


def before_stop(text: str, stops: list[str]) -> str:
    """The text up to the stop string that is complete first; of those that end together, the longest."""
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)]
    return text
