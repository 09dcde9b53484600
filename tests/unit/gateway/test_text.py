"""Text from tokens: stop strings, whole characters, vocabularies."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from services.gateway.stop import StopMatcher
from services.gateway.vocabulary import Detokenizer, Vocabulary, readable
from shared.errors import ModelError
from tests.unit.gateway.harness import Words

LETTERS = st.text(alphabet="ab", min_size=0, max_size=12)


@given(pieces=st.lists(LETTERS, max_size=8), stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=4))
def test_any_cut_of_the_text_ends_at_the_first_stop_string(pieces: list[str], stops: list[str]) -> None:
    matcher, shown, stopped = StopMatcher(stops), "", False
    for piece in pieces:
        cut = matcher.feed(piece)
        shown += cut.text
        assert not any(stop in shown for stop in stops)
        if cut.stopped:
            stopped = True
            break
    else:
        shown += matcher.flush()
    text = "".join(pieces)
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    assert stopped == bool(ends)
    if not stopped:
        assert shown == text
    else:
        assert text.startswith(shown)
        assert any(text[len(shown) :].startswith(stop) for stop in stops)


def test_nothing_is_held_back_longer_than_needed() -> None:
    matcher = StopMatcher(["END"])
    assert [matcher.feed(char).text for char in "xENxE"] == ["x", "", "", "ENx", ""]
    assert matcher.flush() == "E"


@given(text=st.text(max_size=30))
def test_byte_level_text_is_what_the_tokenizer_decodes(words_and_vocabulary, text: str) -> None:
    words, vocabulary = words_and_vocabulary
    detokenizer = Detokenizer(vocabulary)
    ids = words.ids(text)
    pieces = [detokenizer.feed(token) for token in ids]
    assert "".join(pieces) + detokenizer.flush() == words.tokenizer.decode(ids, skip_special_tokens=True)


@pytest.fixture(scope="session")
def words_and_vocabulary(model_folder: Path) -> tuple[Words, Vocabulary]:
    words = Words(model_folder)
    return words, Vocabulary(words.tokenizer, model_folder / "tokenizer.json")


def test_special_tokens_are_no_text(words_and_vocabulary: tuple[Words, Vocabulary]) -> None:
    words, vocabulary = words_and_vocabulary
    assert vocabulary.text_bytes(words.end) == b""
    assert vocabulary.token_bytes(words.end) == b"<|im_end|>"
    assert vocabulary.text_bytes(259) == b""  # in the model's table, not in the tokenizer's


def test_sentencepiece_vocabulary(tmp_path: Path) -> None:
    vocab = {"<unk>": 0, "▁hi": 1, "<0xC3>": 2, "<0xA9>": 3, "x": 4}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    detokenizer = Detokenizer(Vocabulary(tokenizer, tmp_path / "tokenizer.json"))
    assert [detokenizer.feed(token) for token in (1, 2, 3, 4)] == [" hi", "", "é", "x"]


def test_another_family_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({"decoder": {"type": "WordPiece"}}))
    with pytest.raises(ModelError, match="WordPiece"):
        Vocabulary(Tokenizer(models.BPE()), file)


def test_bytes_that_are_no_text_are_written_out() -> None:
    assert readable("é".encode()) == "é"
    assert readable(b"\xf0\x9f") == "bytes:\\xf0\\x9f"
