"""EVENT-01: what `kvtide events` makes of the events."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from kvtide.cli import FAILED, main
from kvtide.events.block_map import BlockMap, Part
from kvtide.events.command import picture
from shared.messages.events import AllBlocksCleared, BlockRemoved, BlockStored, Medium


def stored(first: int, count: int, parent: int | None = None, medium: Medium = "GPU") -> BlockStored:
    """Pages `first`, `first` + 1, ... of two tokens each."""
    names = list(range(first, first + count))
    return BlockStored(
        names, parent, [token for name in names for token in (10 * name, 10 * name + 1)], 2, None, medium
    )


def test_a_prefix_is_one_part_per_set_of_tiers() -> None:
    known = BlockMap()
    known.apply([stored(1, 3), stored(1, 2, medium="CPU_PINNED"), stored(1, 1, medium="DISK")])
    assert list(known.parts()) == [
        Part(0, 0, [10, 11], 1, ("GPU", "CPU_PINNED", "DISK")),
        Part(0, 2, [20, 21], 1, ("GPU", "CPU_PINNED")),
        Part(0, 4, [30, 31], 1, ("GPU",)),
    ]
    assert known.pages() == {"GPU": 3, "CPU_PINNED": 2, "DISK": 1, "EXTERNAL": 0}


def test_a_branch_stands_below_what_it_shares() -> None:
    known = BlockMap()
    known.apply([stored(1, 2), stored(5, 2, parent=2), stored(8, 1, parent=2)])
    assert [(part.depth, part.start, part.pages) for part in known.parts()] == [(0, 0, 2), (1, 4, 2), (1, 4, 1)]


def test_a_page_is_known_until_the_last_tier_has_lost_it() -> None:
    known = BlockMap()
    known.apply([stored(1, 1), stored(1, 1, medium="DISK"), stored(1, 1), BlockRemoved([1, 7], "GPU")])
    assert [part.tiers for part in known.parts()] == [("DISK",)]
    known.apply([BlockRemoved([1], "DISK"), BlockRemoved([1], "DISK")])
    assert (len(known), list(known.parts())) == (0, [])
    known.apply([stored(1, 1), AllBlocksCleared()])
    assert len(known) == 0


def test_a_page_whose_parent_is_in_no_tier_is_shown_and_joins_it_again() -> None:
    known = BlockMap()
    known.apply([stored(2, 1, parent=1, medium="CPU_PINNED")])
    assert [part.pages for part in known.parts()] == [1]
    known.apply([stored(1, 1, medium="CPU_PINNED")])
    assert list(known.parts()) == [Part(0, 0, [10, 11, 20, 21], 2, ("CPU_PINNED",))]


def test_the_map_can_be_read_and_says_what_it_leaves_out() -> None:
    known = BlockMap()
    known.apply([stored(1, 2), stored(1, 2, medium="DISK"), stored(5, 2, parent=2)])
    console = Console(width=80, file=io.StringIO())
    with console.capture() as captured:
        console.print(picture(known, lambda tokens: f"[b]text of {tokens[0]}\n", 1))
    lines = [" ".join(line.split()) for line in captured.get().splitlines()]
    assert lines == [
        "pages: GPU 4 DISK 2",
        "prefix GPU CPU_PINNED DISK EXTERNAL tokens",
        "[b]text of 10 2 - 2 - 0..4",
        "and 1 more",
    ]


def test_without_an_endpoint_the_command_names_the_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["events", "--set", f"run.folder={tmp_path}"]) == FAILED
    assert "--set events.endpoint=" in capsys.readouterr().err


def test_a_replay_endpoint_alone_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["events", "--set", "events.replay_endpoint=tcp://127.0.0.1:1"]) == FAILED
    assert "set both" in capsys.readouterr().err
