"""Random faults, one every few seconds, some at the same time: of processes, of links, of the disk, in mid-copy."""

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

from shared import test_hooks
from tests.faults.matrix.cells import DISK_FAULTS, LINK_FAULTS, SERVICE_FAULTS, SERVICES
from tests.faults.matrix.faults import broken_disk, hit_service
from tests.faults.matrix.target import Target

BETWEEN_S = (1.0, 6.0)  # from one fault's begin to the next one's
MEAN_S, SHORTEST_S, LONGEST_S = 3.0, 0.5, 25.0  # of a fault that lasts; the longest outlasts a fence's deadline
PLACES = ("worker_step", "worker_load", "worker_write", "storage_read", "storage_write")  # see shared/test_hooks.py
ARMED_S = 5.0  # that a place waits for a process to come there
FILE_FAULTS = ("flipped", "cut", "removed")
FILES = 20  # page files hit at once


class Fault(NamedTuple):
    """What happens to whom."""

    part: str  # a service, a link, "disk", "files", or a place in a service's work
    kind: str


class Weather:
    """Carries faults out. The same seed makes the same ones in the same order."""

    def __init__(self, target: Target, links: Collection[str], l3: Path, seed: int, say: Callable[[str], None]) -> None:
        """links: those that the target has. l3: its folder of page files."""
        self.faults: list[Fault] = []
        self._target = target
        self._links = list(links)
        self._l3 = l3
        self._chance = random.Random(seed)
        self._say = say
        self._hit: set[str] = set()  # parts that a fault is at

    async def run(self, seconds: float) -> None:
        """Storm for so long; at the end all faults are over."""
        begun_s = time.monotonic()
        async with asyncio.TaskGroup() as group:
            while (now_s := time.monotonic() - begun_s) < seconds:
                fault, lasts_s = self._choose()
                if fault.part not in self._hit:
                    self._say(f"{now_s:7.1f} s  {fault.part} {fault.kind}, {lasts_s:.1f} s")
                    self.faults.append(fault)
                    group.create_task(self._carry_out(fault, lasts_s))
                await asyncio.sleep(self._chance.uniform(*BETWEEN_S))

    def _choose(self) -> tuple[Fault, float]:
        choice = self._chance.choice
        fault = choice(
            [
                Fault(choice(SERVICES), choice(SERVICE_FAULTS)),
                Fault(choice(self._links), choice(LINK_FAULTS)),
                Fault("disk", choice(DISK_FAULTS)),
                Fault("files", choice(FILE_FAULTS)),
                Fault(choice(PLACES), choice(("kill", "sleep 1.5"))),
            ]
        )
        return fault, min(LONGEST_S, SHORTEST_S + self._chance.expovariate(1 / MEAN_S))

    async def _carry_out(self, fault: Fault, lasts_s: float) -> None:
        self._hit.add(fault.part)
        try:
            if fault.part in SERVICES:
                await hit_service(self._target, fault.part, fault.kind, lasts_s)
            elif fault.part in self._links:
                await self._target.disturb(fault.part, fault.kind, lasts_s)
            elif fault.part == "disk":
                with broken_disk(self._target.hooks, fault.kind):
                    await asyncio.sleep(lasts_s)
            elif fault.part == "files":
                await asyncio.to_thread(self._harm_files, fault.kind)
            else:
                test_hooks.arm(self._target.hooks, fault.part, fault.kind)
                await asyncio.sleep(ARMED_S)
                (self._target.hooks / fault.part).unlink(missing_ok=True)
        finally:
            self._hit.discard(fault.part)

    def _harm_files(self, kind: str) -> None:
        pages = sorted(self._l3.rglob("*.page"))
        for path in self._chance.sample(pages, min(FILES, len(pages))):
            with contextlib.suppress(FileNotFoundError):  # the storage has just evicted it
                harm(path, kind, self._chance)


def harm(path: Path, kind: str, chance: random.Random) -> None:
    """Flip a bit of a file, cut it, or remove it."""
    if kind == "removed":
        path.unlink()
        return
    size = path.stat().st_size
    at = chance.randrange(size) if size else 0
    with path.open("r+b") as file:
        if kind == "cut":
            file.truncate(at)
        elif size:
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 1 << chance.randrange(8)]))
