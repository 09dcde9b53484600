"""What a trace's lines may be, and what is said of those that are none."""

import gzip
import json
from pathlib import Path

import pytest

from kvtide.replay.trace import read_trace
from shared.errors import TraceError

FORMATS = {
    "mooncake": ({"input_length": 1100, "hash_ids": [7, 8, 9]}, 512, 1100, [7, 8, 9]),
    "block_size": ({"input_length": 130, "block_size": 64, "hash_ids": [7, 8, 9]}, 64, 130, [7, 8, 9]),
    "rle": ({"input_length": 200, "block_size": 64, "rle": [[5, 2], [9, 1]]}, 64, 200, [5, 6, 9]),
    "tokens": ({"tokens": [1] * 64 + [2] * 64 + [1] * 63}, 64, 191, [0, 1, 2]),
    "text": ({"text": "a" * 65}, 64, 65, [0, 1]),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("zipped", [False, True])
def test_a_format_is_read(name: str, zipped: bool, tmp_path: Path) -> None:
    line, page_size, tokens, ids = FORMATS[name]
    data = json.dumps({"timestamp": 5, "output_length": 3, **line}).encode() + b"\n\n"
    path = tmp_path / "trace"
    path.write_bytes(gzip.compress(data) if zipped else data)
    trace = read_trace(path)
    (request,) = trace.requests
    assert (trace.page_size, request.input_tokens, request.ids.tolist()) == (page_size, tokens, ids)
    assert (request.timestamp_ms, request.output_tokens) == (5, 3)
    assert request.whole(page_size).tolist() == ids[: tokens // page_size]


BAD = {
    "not JSON": ("{", "truncated"),
    "no ids": ('{"input_length": 5}', "neither hash_ids nor rle"),
    "wrong type": ('{"input_length": 5, "hash_ids": ["x"]}', "hash_ids"),
    "too few blocks": ('{"input_length": 1300, "hash_ids": [1]}', "the line names 1"),
    "too many blocks": ('{"input_length": 512, "hash_ids": [1, 2]}', "the line names 2"),
    "huge run": ('{"input_length": 512, "rle": [[1, 99999999999]]}', "the line names 99999999999"),
    "negative run": ('{"input_length": 512, "rle": [[1, 2], [5, -1]]}', "the line names 1"),
    "no tokens": ('{"tokens": []}', "an input of 0 tokens"),
    "huge input": ('{"input_length": 99999999999, "hash_ids": []}', "an input of 99999999999 tokens"),
    "another block": ('{"input_length": 64, "block_size": 64, "hash_ids": [1]}', "block_size 64 differs from the 512"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_line_is_named_with_its_reason_or_left_out(name: str, tmp_path: Path) -> None:
    line, reason = BAD[name]
    path = tmp_path / "trace.jsonl"
    good = '{"input_length": 512, "hash_ids": [1]}'
    path.write_text(f"{good}\n{line}\n{good}\n")
    with pytest.raises(TraceError, match=r"trace\.jsonl, line 2: .*; --skip-bad") as caught:
        read_trace(path)
    assert reason in str(caught.value)
    trace = read_trace(path, skip_bad=True)
    assert len(trace.requests) == 2
    assert [bad.number for bad in trace.bad] == [2]
    assert reason in trace.bad[0].reason


def test_a_page_size_that_the_trace_contradicts_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"input_length": 64, "block_size": 64, "hash_ids": [1]}\n')
    with pytest.raises(TraceError, match="block_size is 64, --page-size asks for 128"):
        read_trace(path, 128)


CUT_SHORT = gzip.compress(b'{"tokens": [1]}\n' * 999)[:40]


@pytest.mark.parametrize("content", [b"", b"\n", CUT_SHORT], ids=["empty", "blank", "cut short"])
def test_a_file_without_a_request_or_cut_short_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=r"holds no request|can't be read"):
        read_trace(path)
