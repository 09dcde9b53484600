"""The bytes of each token, so that text can be put together without ever breaking a character."""

import codecs
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from shared.errors import ModelError

SPACE = "▁"  # stands for a space in SentencePiece vocabularies


class _TokenizerFile(msgspec.Struct):
    decoder: dict[str, Any] | None = None


class Vocabulary:
    """Token id -> bytes, for byte-level vocabularies (GPT-2, Llama 3, Qwen) and SentencePiece ones (Llama 2, Gemma)."""

    def __init__(self, tokenizer: Tokenizer, file: Path) -> None:
        """Raises ModelError when the decoder in `file`, the tokenizer's tokenizer.json, is of another family."""
        self._tokenizer = tokenizer
        self._added = tokenizer.get_added_tokens_decoder()
        decoder = msgspec.json.decode(file.read_bytes(), type=_TokenizerFile).decoder or {}
        kinds = {part.get("type") for part in [decoder, *decoder.get("decoders", [])]}
        if "ByteLevel" in kinds:
            self._alphabet: dict[str, int] | None = _byte_alphabet()
        elif kinds & {"ByteFallback", "Metaspace"}:
            self._alphabet = None
        else:
            raise ModelError(
                f"the decoder of {file} ({', '.join(map(str, kinds))}) is not supported: use a model with a byte-level "
                "or SentencePiece (byte fallback) tokenizer"
            )

    def text_bytes(self, token: int) -> bytes:
        """What the token adds to the text: nothing for a special token or an id without a token."""
        added = self._added.get(token)
        if added is not None and added.special:
            return b""
        return self.token_bytes(token)

    def token_bytes(self, token: int) -> bytes:
        """The token's own bytes, special or not."""
        if token in self._added:
            return self._added[token].content.encode()
        piece = self._tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if self._alphabet is not None:
            return b"".join(
                bytes((self._alphabet[char],)) if char in self._alphabet else char.encode() for char in piece
            )
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes((int(piece[3:5], 16),))
        return piece.replace(SPACE, " ").encode()


class Detokenizer:
    """Text of a growing token list; the bytes of an unfinished character wait for the next token."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """The text that has become complete."""
        return self._decoder.decode(self._vocabulary.text_bytes(token))

    def flush(self) -> str:
        """At the end: U+FFFD for a character that was never completed."""
        return self._decoder.decode(b"", final=True)


def readable(data: bytes) -> str:
    """A token as text; bytes that are no text by themselves in OpenAI's notation, such as "bytes:\\xf0\\x9f"."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's one printable character for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
