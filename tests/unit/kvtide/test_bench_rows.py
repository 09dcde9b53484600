"""What a benchmark prints: the last line's JSON, the goal and the exit status."""

import json

import pytest

from kvtide.bench.rows import at_most, compared, plain, report, times


def test_a_rate_is_compared_round_by_round() -> None:
    """Median of ratios, not ratio of medians: a slow phase of the machine hits both sides of its rounds."""
    row = compared("copy", "GB/s", "memcpy", [9.0, 1.0, 8.0], [10.0, 1.25, 40.0], at_least=0.85)
    assert (row.value, row.peer_value, row.ratio, row.goal, row.ok) == (8.0, 10.0, 0.8, ">= 0.85", False)


@pytest.mark.parametrize(
    ("bounds", "goal", "ok"),
    [
        ({"at_most": 1.15}, "<= 1.15", False),
        ({"at_least": 1.2}, ">= 1.2", True),
        ({"at_most": 2.0, "at_least": 1.5}, "<= 2 and >= 1.5", False),
        ({}, None, None),
    ],
)
def test_a_time_is_how_many_times_as_long(bounds: dict[str, float], goal: str | None, ok: bool | None) -> None:
    row = times("host hit", "ms", "device hit", [12.0, 40.0, 11.0], [10.0, 10.0, 10.0], **bounds)
    assert (row.value, row.peer_value, row.ratio, row.goal, row.ok) == (12.0, 10.0, 1.2, goal, ok)


def test_a_limit_is_of_the_value() -> None:
    row = at_most("exists", "ms", [0.1, 0.3, 0.2], 0.2)
    assert (row.value, row.goal, row.ok, row.ratio, row.peer) == (0.2, "<= 0.2", True, None, None)


@pytest.mark.parametrize(("limit", "status"), [(1.0, 0), (0.5, 1)])
def test_the_last_line_of_stdout_is_json_and_a_missed_goal_is_status_1(
    capsys: pytest.CaptureFixture[str], limit: float, status: int
) -> None:
    rows = [plain("first", "GB/s", [2.0]), at_most("exists", "ms", [0.7654321], limit)]
    assert report("storage", rows, as_json=True) == status
    captured = capsys.readouterr()
    result = json.loads(captured.out.splitlines()[-1])
    assert result["bench"] == "storage"
    assert set(result["rows"][0]) == {"what", "value", "unit", "peer", "peer_value", "ratio", "goal", "ok"}
    assert result["rows"][0]["ok"] is None
    assert (result["rows"][1]["value"], result["rows"][1]["ok"]) == (0.7654, status == 0)
    assert "exists" in captured.err
