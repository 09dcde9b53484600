"""The replay's core against a plain LRU over pages, and the numbers of the public traces."""

import json
import os
import random
from collections import OrderedDict
from pathlib import Path

import pytest

from kvtide import cli
from kvtide.replay.driver import Outcome, pages_of, replay
from kvtide.replay.peers import Tiers
from kvtide.replay.trace import Trace
from tests.unit.kvtide.replay.traces import PAGE, random_paths, write_trace


def _plain_lru(paths: list[list[int]], capacity: int) -> list[int]:
    """Leading hit pages: page by page, the longest unused leaf goes first."""
    cache: OrderedDict[tuple[int, ...], None] = OrderedDict()
    hits = []
    for path in paths:
        pages = [tuple(path[: n + 1]) for n in range(min(len(path), capacity))]
        found = next((n for n, page in enumerate(pages) if page not in cache), len(pages))
        hits.append(found)
        while len(cache) + len(pages) - found > capacity:
            parents = {page[:-1] for page in cache}
            del cache[next(page for page in cache if page not in parents and page not in pages[:found])]
        for page in reversed(pages):  # a parent is used no earlier than its children
            cache[page] = None
            cache.move_to_end(page)
    return hits


def _replay(trace: Trace, tiers: Tiers, write_policy: str = "write_through") -> Outcome:
    return replay(trace, pages_of(trace, partial=True), tiers, "lru", write_policy)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("capacity", [3, 9, 20])
def test_tier_04_l1_alone_is_page_exact_lru(seed: int, capacity: int, tmp_path: Path) -> None:
    paths = random_paths(seed, requests=120)
    outcome = _replay(write_trace(tmp_path / "t.jsonl", paths), Tiers(capacity))
    assert [hits.total // PAGE for hits in outcome.hits] == _plain_lru(paths, capacity)


@pytest.mark.parametrize("write_policy", ["write_through", "write_through_selective", "write_back"])
def test_lower_tiers_give_what_the_device_has_lost(write_policy: str, tmp_path: Path) -> None:
    chats = [[chat * 100 + page for page in range(8)] for chat in range(12)]
    trace = write_trace(tmp_path / "t.jsonl", [chat for chat in chats for _ in range(2)] * 3)
    alone, with_host, with_all = (
        _replay(trace, tiers, write_policy) for tiers in (Tiers(8), Tiers(8, 96), Tiers(8, 64, 96))
    )
    again = 24 * 8 * PAGE  # tokens of the chats' later rounds, each first of two requests
    assert [sum(hits.device for hits in each.hits) for each in (alone, with_host, with_all)] == [36 * 8 * PAGE] * 3
    assert [sum(hits.host for hits in each.hits) for each in (alone, with_host)] == [0, again]
    assert sum(hits.host + hits.storage for hits in with_all.hits) == again
    assert sum(hits.storage for hits in with_all.hits) > 0
    assert with_host.written_host_pages == with_all.written_storage_pages == 12 * 8


def test_policy_01_a_partial_page_counts_what_it_holds_or_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_trace(tmp_path / "t.jsonl", [[1, 2], [1, 2], [1, 2, 3], [1, 2, 3]], partial=14)
    rates = {}
    for choice in ("admit", "skip"):
        command = ["replay", str(tmp_path / "t.jsonl"), "--device-pages", "8", "--partial-blocks", choice, "--json"]
        assert cli.main(command) == 0
        result = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert (result["trace"], result["requests"], result["ttft"]) == ("t.jsonl", 4, None)
        rates[choice] = result["whole"], result["last_half"]["hit_rate"]
        assert result["tiers"]["device"]["pages"] == 8
    whole, last_half = rates["admit"]
    assert whole["hit_rate"] == whole["optimal_hit_rate"] == whole["infinite_hit_rate"]
    assert (whole["hit_rate"], last_half) == (round((114 + 128 + 178) / 584, 4), round((128 + 178) / 356, 4))
    assert rates["skip"][1] == round((64 + 128) / 356, 4)


def test_storage_without_host_pages_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(tmp_path / "t.jsonl", [[1]])
    assert cli.main(["replay", str(tmp_path / "t.jsonl"), "--device-pages", "1", "--storage-pages", "9"]) == cli.FAILED
    assert "give --host-pages above 0 too" in capsys.readouterr().err


TRACES = {  # share of unique blocks -> hit rate of LRU and of the optimum over the last half
    "mooncake_conversation": (182_790, {0.01: (0.055, 0.257), 0.03: (0.126, 0.371), 0.1: (0.294, 0.398)}),
    "mooncake_synthetic": (43_924, {0.03: (0.164, 0.413), 0.1: (0.393, 0.666), 0.3: (0.681, 0.863)}),
    "coding_agents_120": (560_170, {0.01: (0.363, 0.603), 0.03: (0.779, 0.861), 0.1: (0.958, 0.962)}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRACES)
def test_policy_03_the_public_traces_give_the_published_rates(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = os.environ.get("KVTIDE_TRACES")
    if not folder:
        pytest.skip("KVTIDE_TRACES names no folder with the public traces")
    unique, points = TRACES[name]
    for share, (lru, best) in points.items():
        pages = str(round(unique * share))
        command = ["replay", f"{folder}/{name}.jsonl.gz", "--device-pages", pages, "--partial-blocks", "admit"]
        assert cli.main([*command, "--json"]) == 0
        found = json.loads(capsys.readouterr().out.splitlines()[-1])["last_half"]
        assert found["hit_rate"] == pytest.approx(lru, abs=0.001)
        assert found["optimal_hit_rate"] == pytest.approx(best, abs=0.001)


def test_policy_02_auto_keeps_what_returns_through_a_scan(tmp_path: Path) -> None:
    rng = random.Random(1)
    hot = [[base, base + 1] for base in range(0, 40, 2)]
    paths = [rng.choice(hot) if at % 2 else list(range(100 + 10 * at, 108 + 10 * at)) for at in range(1200)]
    trace = write_trace(tmp_path / "scan.jsonl", paths)
    pages, tiers = pages_of(trace, partial=True), Tiers(60, 0, 0)
    hits = {name: sum(hit.total for hit in replay(trace, pages, tiers, name).hits) for name in ("lru", "auto")}
    assert hits["auto"] > 1.3 * hits["lru"]
