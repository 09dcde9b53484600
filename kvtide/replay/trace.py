"""Reading traces: one request a line, named by hash ids, runs of ids, tokens or text."""

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from shared.errors import TraceError

Ids = npt.NDArray[np.int64]

MOONCAKE_BLOCK = 512  # tokens of a block in Mooncake's traces, whose lines don't say it
TEXT_PAGE = 64  # tokens of a page when a trace of tokens or text is cut into pages: the stack's default
MAX_INPUT_TOKENS = 2**24  # of a request: 60 times the longest of the public traces; a damaged count stops here
NO_IDS: Ids = np.empty(0, np.int64)
GZIP_MAGIC = b"\x1f\x8b"


class TraceRequest(NamedTuple):
    """One request."""

    timestamp_ms: float
    input_tokens: int
    output_tokens: int
    ids: Ids  # of its pages, first to last; a partial last page may be named or not

    def whole(self, page_size: int) -> Ids:
        """Its whole pages."""
        return self.ids[: self.input_tokens // page_size]


class BadLine(NamedTuple):
    """A line that is no request."""

    number: int  # 1-based
    reason: str


class Trace(NamedTuple):
    """Requests in the order of the file."""

    name: str
    page_size: int  # tokens
    requests: list[TraceRequest]
    bad: list[BadLine]  # left out


class _Line(msgspec.Struct):
    """What is read of a line; other fields are ignored."""

    timestamp: float = 0.0  # ms
    input_length: int | None = None  # tokens
    output_length: int = 0  # tokens
    block_size: int | None = None  # tokens
    hash_ids: list[int] | None = None
    rle: list[tuple[int, int]] | None = None  # (first id, number of consecutive ids)
    tokens: list[int] | None = None
    text: str | None = None


def read_trace(path: Path, page_size: int | None = None, *, skip_bad: bool = False) -> Trace:
    """The trace in a JSONL file, gzipped or not. `page_size`: tokens; None = what the trace says, or its format.

    Raises TraceError for a file that can't be read or holds no request, and for the first bad line unless
    `skip_bad`.
    """
    parser = _Parser(page_size)
    requests: list[TraceRequest] = []
    bad: list[BadLine] = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(_lines(file), 1):
                if not line.strip():
                    continue
                try:
                    requests.append(parser.parse(line))
                except (ValueError, msgspec.DecodeError) as error:
                    if not skip_bad:
                        raise TraceError(f"{path}, line {number}: {error}; --skip-bad leaves such lines out") from error
                    bad.append(BadLine(number, str(error)))
    except (OSError, EOFError) as error:  # a damaged gzip file is an OSError or an EOFError
        raise TraceError(f"{path} can't be read: {error}") from error
    if not requests or parser.page_size is None:
        raise TraceError(f"{path} holds no request ({len(bad)} bad lines); docs/policies.md shows the formats")
    return Trace(path.name, parser.page_size, requests, bad)


def _lines(file: BinaryIO) -> Iterator[bytes]:
    magic = file.read(len(GZIP_MAGIC))
    file.seek(0)
    return iter(gzip.GzipFile(fileobj=file) if magic == GZIP_MAGIC else file)


class _Parser:
    """Remembers what all lines of a trace share."""

    def __init__(self, page_size: int | None) -> None:
        self._wanted = page_size
        self.page_size: int | None = None
        self._decoder = msgspec.json.Decoder(_Line)
        self._pages: dict[bytes, int] = {}  # content of a page -> its id

    def parse(self, line: bytes) -> TraceRequest:
        """One request. Raises ValueError or msgspec.DecodeError with the reason why it is none."""
        fields = self._decoder.decode(line)
        if fields.hash_ids is not None or fields.rle is not None:
            return self._hashed(fields)
        if fields.tokens is not None:
            tokens = np.array(fields.tokens, np.int64)
        elif fields.text is not None:
            tokens = np.frombuffer(fields.text.encode(), np.uint8).astype(np.int64)  # a byte stands for a token
        else:
            raise ValueError("it has neither hash_ids nor rle, tokens or text")
        _check_length(len(tokens))
        page_size = self._agree(fields.block_size, TEXT_PAGE)
        pages = [tokens[at : at + page_size].tobytes() for at in range(0, len(tokens), page_size)]
        ids = [self._pages.setdefault(page, len(self._pages)) for page in pages]
        return TraceRequest(fields.timestamp, len(tokens), fields.output_length, np.array(ids, np.int64))

    def _hashed(self, fields: _Line) -> TraceRequest:
        if fields.input_length is None:
            raise ValueError("it has hash ids but no input_length")
        _check_length(fields.input_length)
        page_size = self._agree(fields.block_size, MOONCAKE_BLOCK)
        runs = fields.rle or []
        count = len(fields.hash_ids) if fields.hash_ids is not None else sum(length for _, length in runs)
        whole, partial = divmod(fields.input_length, page_size)
        if not whole <= count <= whole + (partial > 0) or any(length < 1 for _, length in runs):
            raise ValueError(
                f"input_length {fields.input_length} is {fields.input_length / page_size:.1f} blocks of {page_size} "
                f"tokens, the line names {count}"
            )
        try:
            if fields.hash_ids is not None:
                ids = np.array(fields.hash_ids, np.int64)
            else:
                ids = np.concatenate([NO_IDS, *(np.arange(at, at + length, dtype=np.int64) for at, length in runs)])
        except OverflowError:
            raise ValueError("a hash id has more than 64 bits") from None
        return TraceRequest(fields.timestamp, fields.input_length, fields.output_length, ids)

    def _agree(self, stated: int | None, usual: int) -> int:
        if self.page_size is None:
            page_size = stated or self._wanted or usual
            if page_size < 1:
                raise ValueError(f"block_size {page_size} is no number of tokens")
            if self._wanted not in (None, page_size):
                raise ValueError(f"block_size is {page_size}, --page-size asks for {self._wanted}: leave it out")
            self.page_size = page_size
        elif stated not in (None, self.page_size):
            raise ValueError(f"block_size {stated} differs from the {self.page_size} of the lines before")
        return self.page_size


def _check_length(tokens: int) -> None:
    if not 0 < tokens <= MAX_INPUT_TOKENS:
        raise ValueError(f"an input of {tokens} tokens; 1 to {MAX_INPUT_TOKENS} can be replayed")
