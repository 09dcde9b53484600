"""Replay by timestamp: what the cost model says, worked out by hand."""

import json
from pathlib import Path

import pytest

from kvtide import cli
from kvtide.replay.costs import Modelled, Speeds
from kvtide.replay.driver import pages_of, replay
from kvtide.replay.peers import Tiers
from kvtide.replay.timed import replay_by_time
from kvtide.replay.trace import Trace
from tests.unit.kvtide.replay.traces import PAGE, random_paths, write_trace

SPEEDS = Speeds(prefill=640, copy=1.0, disk=0.5, kv_bytes=1_562_500)  # a page: 0.1 s of prefill, copy 0.1 s, disk 0.2 s


def _run(trace: Trace, tiers: Tiers, concurrency: int = 1) -> tuple[list[int], dict[str, float]]:
    pages = pages_of(trace, partial=True)
    outcome, ttft = replay_by_time(trace, pages, tiers, "lru", "write_through", concurrency, SPEEDS)
    return [hits.total // PAGE for hits in outcome.hits], ttft


def test_a_step_ends_after_its_pages_and_after_its_loads() -> None:
    costs = Modelled(SPEEDS, PAGE)
    assert costs.step(1.0, 3, 1.0) == pytest.approx(1.3)
    assert costs.step(1.0, 1, 1.0) == pytest.approx(1.4)  # after the one before
    assert costs.step(2.0, 1, 5.0) == pytest.approx(5.0)
    assert [costs.copy(9.0, 2, load=True), costs.copy(9.0, 1, load=True)] == pytest.approx([9.2, 9.3])
    assert [costs.copy(9.0, 1, load=False), costs.disk(9.0, 1, read=True)] == pytest.approx([9.1, 9.2])


def test_ttft_counts_prefill_queue_and_what_the_cache_saves(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.jsonl", [[1, 2, 3, 4], [1, 2, 3, 4], [9, 8]])  # at 0, 0.1 and 0.2 s
    hits, ttft = _run(trace, Tiers(16))
    assert hits == [0, 4, 0]
    # 0.4 s; from 0.1 to 0.4, all cached; from 0.2 to 0.6
    assert ttft["mean_s"] == pytest.approx((0.4 + 0.3 + 0.4) / 3, abs=1e-3)
    assert ttft["p50_s"] == pytest.approx(0.4)


def test_requests_at_once_don_t_share_what_isn_t_computed_yet(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.jsonl", [[1, 2, 3, 4]] * 2)
    trace = trace._replace(requests=[request._replace(timestamp_ms=0) for request in trace.requests])
    hits, ttft = _run(trace, Tiers(16), concurrency=2)
    assert hits == [0, 4]  # the second comes to the core while the first one's step runs
    assert ttft["p99_s"] == pytest.approx(0.4)


def test_a_load_back_takes_the_copy_s_time(tmp_path: Path) -> None:
    first, other = [1, 2, 3, 4], [11, 12, 13, 14]
    trace = write_trace(tmp_path / "t.jsonl", [first, other, first])
    requests = [request._replace(timestamp_ms=10_000 * at) for at, request in enumerate(trace.requests)]
    hits, ttft = _run(trace._replace(requests=requests), Tiers(4, 16))
    assert hits == [0, 0, 4]
    assert ttft["mean_s"] == pytest.approx(0.4)  # 0.4 s of prefill twice, then 0.4 s of copying


@pytest.mark.parametrize("tiers", [Tiers(12), Tiers(12, 40), Tiers(12, 40, 60)])
def test_with_time_to_spare_timed_and_instant_replay_agree(tiers: Tiers, tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "t.jsonl", random_paths(3, requests=80))
    trace = trace._replace(
        requests=[request._replace(timestamp_ms=60_000 * at) for at, request in enumerate(trace.requests)]
    )
    instant = replay(trace, pages_of(trace, partial=True), tiers)
    hits, _ = _run(trace, tiers, concurrency=4)
    assert hits == [each.total // PAGE for each in instant.hits]


def test_speeds_are_a_preset_s_or_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(tmp_path / "t.jsonl", [[1, 2]])
    command = ["replay", str(tmp_path / "t.jsonl"), "--device-pages", "8", "--concurrency", "4", "--json"]
    found = []
    for more in ([], ["--preset", "small-cpu"], ["--preset", "small-cpu", "--prefill", "256"]):
        assert cli.main([*command, *more]) == 0
        found.append(json.loads(capsys.readouterr().out.splitlines()[-1])["ttft"]["p50_s"])
    assert found == pytest.approx([128 / 30_000, 0.128, 0.5], abs=1e-4)
