"""Many replays of one trace."""

import builtins
import json
from pathlib import Path
from typing import Any, get_args

import pytest

from kvtide import cli
from kvtide.replay.plot import merged
from services.scheduler.core.settings import Eviction, WritePolicy
from tests.unit.kvtide.replay.traces import random_paths, write_trace

CHATS = [[chat * 100 + page for page in range(8)] for chat in range(10)]


def _json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert cli.main(["replay", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_compare_has_every_strategy_and_write_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(tmp_path / "t.jsonl", CHATS * 3)
    trace = str(tmp_path / "t.jsonl")
    rows = _json(capsys, trace, "--compare", "--device-pages", "16", "--host-pages", "96", "--kv-bytes", "10")[
        "compare"
    ]
    pairs = {(row["eviction"], row["write_policy"]) for row in rows}
    assert pairs == {(a, b) for a in get_args(Eviction) for b in get_args(WritePolicy)}
    through = next(row for row in rows if (row["eviction"], row["write_policy"]) == ("lru", "write_through"))
    assert through["hit_rate"] == round(2 / 3, 4)
    assert through["written_bytes_per_hit_token"] == 5  # each page is written once and hit twice
    assert through["recomputed_tokens"] == 0
    rates = [row["last_half_hit_rate"] for row in rows]
    assert rates == sorted(rates, reverse=True)
    alone = _json(capsys, trace, "--compare", "--device-pages", "16")["compare"]
    assert len(alone) == len(get_args(Eviction))
    lru = next(row for row in alone if row["eviction"] == "lru")
    assert (lru["hit_rate"], lru["recomputed_tokens"]) == (0, 2 * 80 * 64)


def test_sweep_finds_the_smallest_size_of_each_tier(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(tmp_path / "t.jsonl", CHATS * 4)
    trace = str(tmp_path / "t.jsonl")
    alone = _json(capsys, trace, "--sweep", "1")["sweep"]
    assert alone == [{"tier": "device", "wanted_hit_rate": 1.0, "pages": {"device": 80, "host": 0, "storage": 0}}]
    _, host = _json(capsys, trace, "--sweep", "1", "--device-pages", "8")["sweep"]
    assert host["pages"]["device"] == 8
    assert 72 <= host["pages"]["host"] <= 80
    assert _json(capsys, trace, "--sweep", "1", "--eviction", "lru")["sweep"][0]["pages"]["device"] == 80


def test_sweep_says_when_no_size_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(tmp_path / "t.jsonl", [[1], [2], [3], [4]])
    assert cli.main(["replay", str(tmp_path / "t.jsonl"), "--sweep", "0.5"]) == 0
    assert "hit rate 0.5 by device pages: no size is enough" in capsys.readouterr().out


def test_plot_draws_a_curve_below_the_optimum(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    write_trace(tmp_path / "t.jsonl", random_paths(1, requests=200))
    picture = tmp_path / "curve.png"
    curve = _json(capsys, str(tmp_path / "t.jsonl"), "--plot", str(picture))["curve"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert curve["pages"] == sorted(curve["pages"])
    assert curve["rates"].keys() == {"lru"}
    assert all(rate <= best for rate, best in zip(curve["rates"]["lru"], curve["optimum"], strict=True))
    assert max(curve["optimum"]) <= curve["infinite"]


def test_plot_names_equal_curves_together() -> None:
    rates = {"lru": [0.1, 0.2], "fifo": [0.1, 0.3], "priority": [0.1, 0.2]}
    assert merged(rates) == [(["lru", "priority"], [0.1, 0.2]), (["fifo"], [0.1, 0.3])]


def test_plot_without_matplotlib_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name == "matplotlib":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    write_trace(tmp_path / "t.jsonl", [[1]])
    assert cli.main(["replay", str(tmp_path / "t.jsonl"), "--plot", str(tmp_path / "x.png")]) == cli.FAILED
    assert capsys.readouterr().err == (
        "kvtide: --plot needs matplotlib, which isn't installed: pip install 'kvtide[plot]'\n"
    )


@pytest.mark.parametrize("arguments", [[], ["--compare"], ["--plot", "x.png", "--host-pages", "3"]])
def test_a_replay_without_device_memory_is_refused(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_trace(tmp_path / "t.jsonl", [[1]])
    assert cli.main(["replay", str(tmp_path / "t.jsonl"), *arguments]) == cli.FAILED
    assert "give --device-pages above 0" in capsys.readouterr().err
