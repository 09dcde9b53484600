"""One run: the real core, simulated peers, and what happens to them."""

import random
from collections import Counter
from collections.abc import Callable

from kvtide.simulation import checks
from kvtide.simulation.clock import Clock
from kvtide.simulation.content import checksum, of_rank, root, spoil, walk
from kvtide.simulation.gateway import Ask, SimGateway, Traffic
from kvtide.simulation.neighbour import Neighbour
from kvtide.simulation.network import Network
from kvtide.simulation.plan import Fault, Plan
from kvtide.simulation.process import Pausable
from kvtide.simulation.segment import Segment, geometry
from kvtide.simulation.shell import Shell
from kvtide.simulation.storage import SimStorage, StoredPage
from kvtide.simulation.worker import SimWorker
from shared.messages.gateway import Usage
from shared.packed import pack
from shared.page_hash import chain

MODEL = b"m" * 32
CHECK_EVERY = 128  # actions between two looks at what pages hold
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
        self.geometries = [geometry(plan.settings.page_size, rank, plan.settings.tp_size) for rank in range(self.ranks)]
        self.model = MODEL
        self.seen: Counter[str] = Counter()  # faults, states and outcomes that were reached
        self.events = 0  # of all cores
        self.segments: dict[tuple[str, int], Segment] = {}  # by storage and epoch
        self.roots: dict[str, int] = {}  # request id -> hash that its namespace's sequences start from
        self.l3: dict[str, dict[bytes, StoredPage]] = {each: {} for each in plan.backends}  # by backend id
        self.slow_l3_s = 0.0
        self.stall_s = 0.0  # how much longer a copy takes that begins now
        self.failing_l3 = False
        self.refusing: set[str] = set()  # storages that open no segment
        self.neighbours: list[Neighbour] = []
        self._log = log
        self._epochs = 1000
        self.network = Network(self, plan)
        self.traffic = Traffic(self)
        self._fill_l3()
        self.asks: list[Ask] = []
        self.ended = 0  # of them
        self.shell = Shell(self)
        self.old_shells: list[Shell] = []  # that run beside their successor
        self.workers = [SimWorker(self, rank) for rank in range(self.ranks)]
        self.storages: list[SimStorage] = []
        for number in range(len(plan.backends)):
            self.clock.after(plan.joins[number], self._join, number)
        self.gateway = SimGateway(self, "gateway-0")

    def _join(self, number: int) -> None:
        self.storages.append(SimStorage(self, number))
        self.seen["storage_joined"] += number > 0

    @property
    def ranks(self) -> int:
        """TP ranks."""
        return self.plan.settings.tp_size

    def _fill_l3(self) -> None:
        size = self.plan.settings.page_size
        for family in self.traffic.stored_families():
            slots = walk(root(b""), family)
            walks = [of_rank(slots, rank) for rank in range(self.ranks)]
            for at, digest in enumerate(chain(b"", pack(family), size)):
                parts = tuple(tuple(part[at * size : at * size + size]) for part in walks)
                for backend_id, store in self.l3.items():
                    if backend_id != "none" and self.rng.random() < 0.97:
                        store[digest] = StoredPage(parts, checksum(parts))

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
        self.seen[f"policy {self.plan.settings.write_policy}"] += 1
        self.seen[f"ranks {self.ranks}"] += 1
        self.seen[f"storages {len(self.plan.backends)}"] += 1
        for number in range(self.plan.requests):
            self.clock.after(self._arrival(number), self._arrive)
        for fault in self.plan.faults:
            self.clock.after(fault.at, lambda fault=fault: self._strike(fault))
        limit = self.plan.faults_end + SETTLE_S
        clock, peace = self.clock, self.plan.faults_end
        while clock.now < peace or not self._is_over():
            if not clock.step() or clock.now > limit or clock.steps > MAX_ACTIONS:
                self.fail(f"not over after {clock.steps} actions: {checks.unfinished(self)}")
            if clock.steps % CHECK_EVERY == 0:
                checks.check_contents(self)
        checks.check_contents(self)
        for each in self.neighbours:
            each.check()
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
        return self.ended >= self.plan.requests and checks.is_quiet(self)

    # --- faults -------------------------------------------------------------------------------------------------

    def _strike(self, fault: Fault) -> None:
        self.note(f"*** {fault.kind} for {fault.seconds} s")
        self.seen[fault.kind] += 1
        action, _, part = fault.kind.partition("_")
        match action:
            case "kill":
                self._kill(part, fault)
            case "pause":
                process = self._process(part, fault.target)
                if process is not None and process.alive and not process.paused:
                    process.pause()
                    self.clock.after(fault.seconds, process.resume)
            case "zombie":
                self._replace_paused(fault.target % self.ranks, fault.seconds)
            case "second":
                self._start_second(fault.seconds)
            case "cut":
                identity = f"{part}-{fault.target % (self.ranks if part == 'worker' else max(1, len(self.storages)))}"
                self.network.cut.add(identity)
                self.clock.after(fault.seconds, lambda: self.network.cut.discard(identity))
            case _:
                self._trouble(fault)

    def _start_second(self, seconds: float) -> None:
        """A scheduler of the same identity starts; one peer after the other is connected to it. The first one, should
        nobody tell it to exit, is found out after a while."""
        old = self.shell
        if not old.alive or old.paused:
            return
        self.old_shells.append(old)
        self.shell = Shell(self)
        for process in [*self.workers, *self.storages, self.gateway]:
            process.link = old
            self.clock.after(self.rng.uniform(0.0, seconds), setattr, process, "link", None)
        self.clock.after(seconds + 1.0, old.kill)

    def _process(self, part: str, target: int) -> Pausable | None:
        match part:
            case "worker":
                return self.workers[target % self.ranks]
            case "storage":
                return self.storages[target % len(self.storages)] if self.storages else None
            case "gateway":
                return self.gateway
        return self.shell

    def _kill(self, part: str, fault: Fault) -> None:
        process = self._process(part, fault.target)
        if process is None or not process.alive:
            return
        process.kill()
        if part == "scheduler":
            self.network.scheduler = None
        self.clock.after(fault.seconds, self._restart, part, process)

    def _replace_paused(self, rank: int, seconds: float) -> None:
        """A worker hangs and is replaced; it wakes up later, writes on for a while, and then ends."""
        old = self.workers[rank]
        if not old.alive or old.paused:
            return
        old.pause()
        self.clock.after(seconds / 3, self._restart, "worker", old)
        self.clock.after(seconds, old.resume)
        self.clock.after(seconds + 1.0, self._end_zombie, old)

    def _end_zombie(self, old: SimWorker) -> None:
        if old not in self.workers and old.alive:
            old.kill()

    def _restart(self, part: str, old: Pausable) -> None:
        self.note(f"*** {part} is back")
        match old:
            case SimWorker() if old in self.workers:
                self.workers[old.rank] = SimWorker(self, old.rank)
            case SimStorage() if old in self.storages:
                self.storages[self.storages.index(old)] = SimStorage(self, old.number)
            case SimGateway():
                self.gateway = SimGateway(self, "gateway-0")
            case Shell():
                self.shell = Shell(self)

    def _trouble(self, fault: Fault) -> None:
        match fault.kind:
            case "stall_copy":
                self.stall_s = fault.seconds
                self.clock.after(fault.seconds / 4, lambda: setattr(self, "stall_s", 0.0))
            case "slow_l3":
                self.slow_l3_s = fault.seconds / 4
                self.clock.after(fault.seconds, lambda: setattr(self, "slow_l3_s", 0.0))
            case "failing_l3":
                self.failing_l3 = True
                self.clock.after(fault.seconds, lambda: setattr(self, "failing_l3", False))
            case "refuse_segment":
                identity = f"storage-{fault.target % max(1, len(self.storages))}"
                self.refusing.add(identity)
                self.clock.after(fault.seconds, self.refusing.discard, identity)
            case "corrupt_l3":
                for store in self.l3.values():
                    self._corrupt(store)
            case "corrupt_host":
                self._corrupt_host(fault.target)

    def _corrupt(self, store: dict[bytes, StoredPage]) -> None:
        for digest in self.rng.sample(sorted(store), len(store) // 2):
            stored = store[digest]
            if self.rng.random() < 0.5:
                del store[digest]  # truncated: its header says so, and it is a miss
            else:
                store[digest] = stored._replace(parts=(*stored.parts[:-1], spoil(stored.parts[-1])))

    def _corrupt_host(self, target: int) -> None:
        segment = self.storages[target % len(self.storages)].current if self.storages else None
        names = sorted(page for page in segment.names if page in segment.leased) if segment is not None else []
        if segment is not None:
            rank = target % self.ranks
            for page in self.rng.sample(names, (len(names) + 1) // 2):
                segment.content[rank][page] = spoil(segment.content[rank][page])
                segment.spoilt.add(page)
