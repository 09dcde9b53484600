"""Commands for fake children, a wait for what they note, and a supervisor that can be killed from outside."""

import asyncio
import os
import sys
import time
from pathlib import Path

from kvtide.child import Command
from kvtide.run_folder import claimed, record_children
from kvtide.supervisor import Supervisor

SCRIPT = Path(__file__).with_name("fake_child.py")
DEADLINE_S = 20.0


def command(folder: Path, name: str, behaviour: str = "serve", grace_s: float = 5.0) -> Command:
    """A fake child that notes into `folder/notes`."""
    return Command(
        identity=name,
        argv=(sys.executable, "-S", "-E", str(SCRIPT), name, str(folder / "notes"), behaviour),
        folder=folder,
        log=folder / f"{name}.log",
        environment=dict(os.environ),
        grace_s=grace_s,
    )


def notes(folder: Path, word: str) -> list[tuple[str, int, float]]:
    """(name, pid, time in s) of every note that starts with `word`, in order."""
    path = folder / "notes"
    lines = path.read_text().splitlines() if path.exists() else []
    found = [line.split() for line in lines]
    return [(name, int(pid), float(at)) for kind, name, pid, at in found if kind == word]


def wait_for_notes(folder: Path, word: str, count: int) -> list[tuple[str, int, float]]:
    """The notes, once there are `count` of them. Blocks."""
    deadline = time.monotonic() + DEADLINE_S
    while len(found := notes(folder, word)) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} {word!r} notes after {DEADLINE_S} s"
        time.sleep(0.01)
    return found


async def supervise(folder: Path) -> None:
    """Run two fake children until cancelled or killed."""
    with claimed(folder):
        async with Supervisor(
            [command(folder, "one"), command(folder, "two")],
            ["one", "two"],
            lambda line: None,
            lambda pids: record_children(folder, pids),
        ) as supervisor:
            await supervisor.watch()


if __name__ == "__main__":
    asyncio.run(supervise(Path(sys.argv[1])))
