"""`kvtide bench serve`: what is asked, what memory each side gets, how answers are read and compared."""

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from kvtide import cli
from kvtide.bench.serve.engines import PEERS, Reply, stream_chat
from kvtide.bench.serve.figures import Run, figures, rows
from kvtide.bench.serve.plan import MAX_TOKENS, MOST_SESSIONS, QUESTION_TOKENS, Chat, budget, order
from kvtide.chat_client import RequestError
from kvtide.child import StackError
from shared.service import PARENT_VARIABLE

TOKEN_BYTES = 1000


def test_a_budget_has_whole_pages_a_quarter_of_the_contexts_on_the_device_and_the_rest_on_the_host() -> None:
    room = budget(1000, sessions=16, turns=5, memory=1.0, page_size=64, token_bytes=TOKEN_BYTES)
    longest = 1000 + MAX_TOKENS + 4 * (MAX_TOKENS + QUESTION_TOKENS)
    assert longest <= room.context_tokens < longest + 64
    assert room.context_tokens % 64 == 0
    assert room.device_tokens == 4 * room.context_tokens
    assert room.total_bytes == 16 * room.context_tokens * TOKEN_BYTES
    assert room.host_bytes + room.device_tokens * TOKEN_BYTES == room.total_bytes


def test_less_memory_takes_from_the_host_alone() -> None:
    whole, half = (budget(1000, 16, 5, memory, 64, TOKEN_BYTES) for memory in (1.0, 0.5))
    assert half.device_tokens == whole.device_tokens
    assert half.total_bytes * 2 == whole.total_bytes
    assert half.host_bytes * 3 == whole.host_bytes


def test_a_budget_of_the_device_alone_is_refused() -> None:
    with pytest.raises(StackError, match=r"--memory 0\.25 .* give more than 0\.25"):
        budget(1000, 16, 5, 0.25, 64, TOKEN_BYTES)


def test_each_session_asks_once_a_turn_in_an_order_that_changes_but_is_the_same_for_all_engines() -> None:
    first, second = order(16, 0), order(16, 1)
    assert sorted(first) == sorted(second) == list(range(16))
    assert first != second
    assert first == order(16, 0)


def test_no_two_sessions_are_about_the_same_and_they_differ_from_the_first_words_on() -> None:
    chats = [Chat(number).messages for number in range(MOST_SESSIONS)]
    assert len({chat[1]["content"] for chat in chats}) == MOST_SESSIONS
    assert len({chat[0]["content"][: len("Reader 00 ")] for chat in chats}) == MOST_SESSIONS
    assert chats == [Chat(number).messages for number in range(MOST_SESSIONS)]


def test_a_chat_goes_on_with_the_answer_and_another_question() -> None:
    chat = Chat(3)
    before = list(chat.messages)
    chat.go_on("The tide comes twice.")
    answer, question = chat.messages[len(before) :]
    assert chat.messages[: len(before)] == before
    assert answer == {"role": "assistant", "content": "The tide comes twice."}
    assert question["role"] == "user"
    assert question["content"] not in before[1]["content"]


def replies(*ttfts_s: float, prompt_tokens: int = 100, hit: int = 0) -> list[Reply]:
    """Answers of 11 tokens in a second each."""
    return [Reply("text", prompt_tokens, 11, ttft_s, 1.0, host_tokens=hit) for ttft_s in ttfts_s]


def test_figures_leave_the_first_turn_out_of_what_returns_and_count_it_among_the_prompts() -> None:
    run = Run([replies(5.0, 5.0), replies(1.0, 2.0), replies(3.0, 4.0)], replies(6.0, 7.0, 8.0), 1)
    found = figures(run)
    assert found.returning_ms == 2500
    assert found.restarted_ms == 7000
    assert found.prompt_rate == pytest.approx(600 / 20)
    assert found.decode_rate == pytest.approx(10.0)


def test_a_ratio_above_one_is_ahead_of_the_peer_in_times_rates_and_memory() -> None:
    ours = Run([replies(1.0), replies(1.0, hit=50)], replies(2.0, hit=100), 2_000_000)
    slower = Run([replies(2.0), replies(4.0)], replies(1.0), 6_000_000)
    made = rows(ours, {"peer": slower}, "conditions")
    assert [(row.value, row.peer_value, row.ratio, row.ok) for row in made if row.peer] == [
        (1000, 4000, 4, True),
        (2000, 1000, 0.5, False),
        (100, pytest.approx(100 / 3), pytest.approx(3), True),
        (10, 10, 1, None),
        (2, 6, 3, None),
    ]
    assert [row.value for row in made if not row.peer] == [0, 50, 0, 0, 100, 0]


def http(lines: str, status: int = 200) -> httpx.AsyncClient:
    """A client of a server that always answers the same."""
    return httpx.AsyncClient(
        base_url="http://peer", transport=httpx.MockTransport(lambda request: httpx.Response(status, text=lines))
    )


async def test_an_answer_is_read_whatever_else_its_stream_has() -> None:
    lines = (
        'data: {"choices": [{"delta": {"role": "assistant"}}]}\n\n: ping\n\n'
        'data: {"choices": [{"delta": {"content": "Twice "}}]}\n\n'
        'data: {"choices": [{"delta": {"content": "a day"}}]}\n\n'
        'data: {"choices": [{"delta": {}, "finish_reason": "length"}]}\n\n'
        'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}\n\ndata: [DONE]\n\n'
    )
    async with http(lines) as client:
        reply = await stream_chat(client, {})
    assert (reply.text, reply.prompt_tokens, reply.tokens) == ("Twice a day", 7, 3)


@pytest.mark.parametrize(
    ("lines", "status", "error"),
    [("out of memory", 500, "status 500: out of memory"), ("data: [DONE]\n\n", 200, "the answer has no text")],
)
async def test_a_failed_or_empty_answer_is_an_error(lines: str, status: int, error: str) -> None:
    async with http(lines, status) as client:
        with pytest.raises(RequestError, match=error):
            await stream_chat(client, {})


def test_a_peer_ends_with_its_supervisor() -> None:
    read_end, write_end = os.pipe()
    command = [sys.executable, str(PEERS / "with_parent.py"), "http.server", "--bind", "127.0.0.1", "0"]
    environment = {**os.environ, PARENT_VARIABLE: str(read_end), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, env=environment, pass_fds=[read_end], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("Serving HTTP")
            assert process.poll() is None
            os.close(write_end)
            assert process.wait(timeout=60) == 1
        finally:
            process.kill()
            os.close(read_end)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--sessions", "6", "--clients", "2"], "--sessions 6 with --clients 2: give 8 to 32"),
        (["--turns", "1"], "--turns 1: sessions return from the second turn on"),
        (["--set", "model.path=/models/other"], "model.path is /models/other, but llama.cpp serves the default model"),
    ],
)
def test_sizes_that_measure_nothing_are_refused(
    arguments: list[str], error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "serve", "--peers", str(tmp_path), *arguments]) == cli.FAILED
    assert error in capsys.readouterr().err


def test_a_folder_without_peers_is_refused_at_once_with_what_to_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "serve", "--peers", str(tmp_path)]) == cli.FAILED
    assert f"run: bench/peers/setup-serve {tmp_path}" in capsys.readouterr().err
