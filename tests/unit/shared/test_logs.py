"""Log lines as JSON: what stands in a text line, by name."""

import json
import logging
import sys

from shared.logs import JsonFormatter, split_line


def formatted(message: str, *arguments: object, exc_info: object = None) -> dict[str, object]:
    record = logging.LogRecord("kvtide.gateway", logging.WARNING, __file__, 1, message, arguments, exc_info)  # type: ignore[arg-type]
    text = JsonFormatter("gateway-0").format(record)
    assert "\n" not in text
    line: dict[str, object] = json.loads(text)
    return line


def test_pairs_become_fields_and_numbers_numbers() -> None:
    line = formatted("request id=%s status=%d ttft_ms=%s seconds=%.3f", "cmpl-7-0", 200, "-", 0.25)
    assert line.pop("time").endswith("+00:00")  # type: ignore[attr-defined]
    assert line == {
        "level": "warning",
        "process": "gateway-0",
        "logger": "kvtide.gateway",
        "event": "request",
        "id": "cmpl-7-0",
        "status": 200,
        "ttft_ms": None,
        "seconds": 0.25,
    }


def test_a_last_value_may_hold_spaces_and_a_sentence_is_an_event() -> None:
    assert split_line("dropped reason=late detail=3 pages, too late") == (
        "dropped",
        {"reason": "late", "detail": "3 pages, too late"},
    )
    assert split_line("superseded: another one leads") == ("superseded: another one leads", {})
    assert split_line("linear=plain dtype=float32") == ("", {"linear": "plain", "dtype": "float32"})


def test_a_line_cannot_pass_for_another_process_or_level() -> None:
    line = formatted("x process=other level=error time=0")
    assert (line["process"], line["level"]) == ("gateway-0", "warning")


def test_an_exception_is_a_field() -> None:
    try:
        raise ValueError("bad\nvalue")
    except ValueError:
        line = formatted("operation_failed op_id=%d", 3, exc_info=sys.exc_info())
    assert line["op_id"] == 3
    assert "ValueError: bad\nvalue" in str(line["exception"])
