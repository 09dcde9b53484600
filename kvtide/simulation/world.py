"""One run: the real core, simulated peers, and what happens to them."""

import random
from collections import Counter
from collections.abc import Callable

from kvtide.simulation import checks
from kvtide.simulation.clock import Clock
from kvtide.simulation.content import EMPTY, checksum, root, walk
from kvtide.simulation.gateway import Ask, SimGateway, Traffic
from kvtide.simulation.network import Network
from kvtide.simulation.plan import Fault, Plan
from kvtide.simulation.segment import Segment
from kvtide.simulation.shell import Shell
from kvtide.simulation.storage import SimStorage, StoredPage
from kvtide.simulation.worker import SimWorker
from shared.geometry import PageGeometry, Part
from shared.messages.gateway import Usage
from shared.packed import pack
from shared.page_hash import chain

MODEL = b"m" * 32
CHECK_EVERY = 64  # actions between two looks at what pages hold
MAX_ACTIONS = 60_000  # a run has some hundred; beyond this it hangs
SETTLE_S = 1500.0  # after the last fault everything must have ended: above the longest request timeout


class SimulationFailure(Exception):
    """Something that must never happen did."""


class World:
    """Everything in one run. `run` raises SimulationFailure, or whatever the core raised."""

    def __init__(self, plan: Plan, log: Callable[[str], None] | None = None) -> None:
        self.plan = plan
        self.clock = Clock()
        self.rng = random.Random(f"world {plan.seed}")
        self.geometry = PageGeometry(plan.settings.page_size, 1, (Part("k", 1, 1, "float32"),))
        self.model = MODEL
        self.seen: Counter[str] = Counter()  # faults, states and outcomes that were reached
        self.events = 0  # of all cores
        self.segments: dict[tuple[str, int], Segment] = {}  # by storage and epoch
        self.step_roots: dict[tuple[int, int], list[int]] = {}  # (scheduler epoch, op_id) -> namespace of each item
        self.l3: dict[bytes, StoredPage] = {}
        self.slow_l3_s = 0.0
        self.failing_l3 = self.refuse_segment = False
        self._log = log
        self._epochs = 1000
        self.network = Network(self, plan)
        self.traffic = Traffic(self)
        self._fill_l3()
        self.asks: list[Ask] = []
        self.shell = Shell(self)
        self.worker = SimWorker(self, "worker-0")
        self.storage = SimStorage(self, "storage-0") if plan.host_pages else None
        self.gateway = SimGateway(self, "gateway-0")

    def _fill_l3(self) -> None:
        size = self.plan.settings.page_size
        for family in self.traffic.stored_families():
            slots = walk(root(b""), family)
            for at, digest in enumerate(chain(b"", pack(family), size)):
                page = tuple(slots[at * size : at * size + size])
                self.l3[digest] = StoredPage(page, checksum([page]))

    def new_epoch(self) -> int:
        """Epochs rise over the whole run."""
        self._epochs += 1
        return self._epochs

    @property
    def traced(self) -> bool:
        """Is there anyone to read notes?"""
        return self._log is not None

    def note(self, text: str) -> None:
        """A line of the trace."""
        if self._log is not None:
            self._log(f"{self.clock.now:10.4f} {text}")

    def fail(self, text: str) -> None:
        """Stop the run."""
        self.note(f"!!! {text}")
        raise SimulationFailure(text)

    def count_hits(self, usage: Usage) -> None:
        """Which tiers gave something."""
        for tier in ("device", "host", "storage"):
            self.seen[f"{tier}_hit"] += getattr(usage, f"{tier}_hit_tokens") > 0

    def run(self) -> None:
        """Traffic and faults, then peace until everything has ended."""
        for number in range(self.plan.requests):
            self.clock.after(self._arrival(number), self._arrive)
        for fault in self.plan.faults:
            self.clock.after(fault.at, lambda fault=fault: self._strike(fault))  # type: ignore[misc]
        limit = self.plan.faults_end + SETTLE_S
        while not self._is_over():
            if not self.clock.step() or self.clock.now > limit or self.clock.steps > MAX_ACTIONS:
                self.fail(f"not over after {self.clock.steps} actions: {checks.unfinished(self)}")
            if self.clock.steps % CHECK_EVERY == 0:
                checks.check_contents(self)
        checks.check_contents(self)
        checks.check_end(self)

    def _arrival(self, number: int) -> float:
        burst = self.rng.random() < 0.3
        at = self.plan.traffic_s * number / self.plan.requests if burst else self.rng.uniform(0, self.plan.traffic_s)
        return 0.1 + at

    def _arrive(self) -> None:
        ask = self.traffic.draw()
        self.asks.append(ask)
        self.gateway.ask(ask)

    def _is_over(self) -> bool:
        if self.clock.now < self.plan.faults_end or len(self.asks) < self.plan.requests:
            return False
        return checks.is_quiet(self)

    # --- faults -------------------------------------------------------------------------------------------------

    def _strike(self, fault: Fault) -> None:
        self.note(f"*** {fault.kind} for {fault.seconds} s")
        self.seen[fault.kind] += 1
        action, _, part = fault.kind.partition("_")
        match action:
            case "kill":
                self._kill(part, fault.seconds)
            case "pause":
                process = self.shell if part == "scheduler" else self.worker if part == "worker" else self.storage
                if process is not None and process.alive and not process.paused:
                    process.pause()
                    self.clock.after(fault.seconds, process.resume)
            case "cut":
                identity = f"{part}-0"
                self.network.cut.add(identity)
                self.clock.after(fault.seconds, lambda: self.network.cut.discard(identity))
            case _:
                self._trouble(fault)

    def _kill(self, part: str, seconds: float) -> None:
        process = {"worker": self.worker, "storage": self.storage, "gateway": self.gateway, "scheduler": self.shell}[
            part
        ]
        if process is None or not process.alive:
            return
        process.kill()
        if part == "scheduler":
            self.network.scheduler = None
        self.clock.after(seconds, lambda: self._restart(part))

    def _restart(self, part: str) -> None:
        self.note(f"*** {part} is back")
        match part:
            case "worker":
                self.worker = SimWorker(self, "worker-0")
            case "storage":
                self.storage = SimStorage(self, "storage-0")
            case "gateway":
                self.gateway = SimGateway(self, "gateway-0")
            case "scheduler":
                self.shell = Shell(self)

    def _trouble(self, fault: Fault) -> None:
        match fault.kind:
            case "slow_l3":
                self.slow_l3_s = fault.seconds / 4
                self.clock.after(fault.seconds, lambda: setattr(self, "slow_l3_s", 0.0))
            case "failing_l3":
                self.failing_l3 = True
                self.clock.after(fault.seconds, lambda: setattr(self, "failing_l3", False))
            case "refuse_segment":
                self.refuse_segment = True
                self.clock.after(fault.seconds, lambda: setattr(self, "refuse_segment", False))
            case "corrupt_l3":
                for digest in self.rng.sample(sorted(self.l3), len(self.l3) // 2):
                    stored = self.l3[digest]
                    if self.rng.random() < 0.5:
                        del self.l3[digest]  # truncated: its header says so, and it is a miss
                    else:
                        self.l3[digest] = stored._replace(content=(EMPTY, *stored.content[1:]))
            case "corrupt_host":
                segment = self.storage.current if self.storage else None
                if segment is not None and segment.names:
                    page = self.rng.choice(sorted(segment.names))
                    segment.content[page] = (EMPTY, *segment.content[page][1:])
                    segment.spoilt.add(page)
