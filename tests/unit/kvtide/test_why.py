"""`kvtide why` without a stack, and what it prints."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from kvtide import cli
from kvtide.why import print_why

ANSWER = {
    "id": "cmpl-1",
    "choices": [
        {
            "choice": 0,
            "prompt_tokens": 70,
            "page_size": 64,
            "recomputed_tokens": {"device": 64, "host": 0, "storage": 0, "any": 64},
            "segments": [
                {
                    "from_token": 0,
                    "to_token": 64,
                    "tier": "computed",
                    "missed": {"device": {"reason": "evicted", "text": "evicted 3 s earlier"}},
                },
                {
                    "from_token": 64,
                    "to_token": 70,
                    "tier": "computed",
                    "missed": {"all": {"reason": "partial_page", "text": "the rest"}},
                },
            ],
        }
    ],
}


def test_an_explanation_is_readable() -> None:
    console = Console(width=100, file=io.StringIO())
    with console.capture() as captured:
        print_why(ANSWER, console)
    text = captured.get()
    assert "cmpl-1 choice 0: 70 prompt tokens; 64 of those computed were in a tier before" in text
    assert "0-64    computed  device: evicted 3 s earlier" in text
    assert "64-70   computed  the rest" in text


def test_without_a_stack_it_says_what_to_do(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["why", "cmpl-1", "--set", f"run.folder={tmp_path}"]) == cli.FAILED
    assert "kvtide serve" in capsys.readouterr().err
    assert cli.main(["why", "cmpl-1", "--url", "http://127.0.0.1:9"]) == cli.FAILED
    assert "http://127.0.0.1:9 does not answer" in capsys.readouterr().err
