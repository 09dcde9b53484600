"""One run: the real core, simulated peers, and what happens to them."""

import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Final

from kvtide.simulation import checks
from kvtide.simulation.clock import Clock
from kvtide.simulation.content import PageContent, checksum, of_rank, root, spoil, walk
from kvtide.simulation.gateway import Ask, SimGateway, Traffic
from kvtide.simulation.network import Network
from kvtide.simulation.plan import WAIT_S, Fault, Plan, make_replica
from kvtide.simulation.process import Pausable
from kvtide.simulation.segment import Segment, geometry
from kvtide.simulation.shell import Shell
from kvtide.simulation.storage import SimStorage, StoredPage
from kvtide.simulation.worker import SimWorker
from shared.link import MISSED_BEATS
from shared.messages.gateway import Usage
from shared.packed import pack, unpack_list
from shared.page_hash import chain

MODEL = b"m" * 32
CHECK_EVERY: Final = 128  # actions between two looks at what pages hold
NAMES_EVERY: Final = 8  # actions between two looks at the names of free pages
MAX_ACTIONS: Final = 60_000  # a run has some hundred; beyond this it hangs
OF_STORAGES = ("kill_storage", "pause_storage", "slow_l3", "failing_l3")
SETTLE_S = 1500.0  # after the last fault everything must have ended: above the longest request timeout


class SimulationFailure(Exception):
    """Something that must never happen did."""


class World:
    """Everything in one run. `run` raises SimulationFailure, or whatever the core raised.

    A replica is a world of its own that shares with the first one the clock, the L3 stores and the storage processes:
    what it sees of those is what they do for its scheduler's identity.
    """

    def __init__(self, plan: Plan, log: Callable[[str], None] | None = None, first: "World | None" = None) -> None:
        self.plan = plan
        self.first = first or self
        self.clock: Clock = first.clock if first else Clock()
        self.rng: random.Random = random.Random(f"world {plan.seed}")
        self.geometries = [geometry(plan.settings.page_size, rank, plan.settings.tp_size) for rank in range(self.ranks)]
        self.model = MODEL
        self.seen: Counter[str] = first.seen if first else Counter()  # faults, states and outcomes that were reached
        self.events = 0  # of its cores
        self.segments: dict[tuple[str, int], Segment] = {}  # by storage and epoch
        self.roots: dict[str, int] = {}  # request id -> hash that its namespace's sequences start from
        self.l3: dict[str, dict[bytes, StoredPage]] = (
            first.l3 if first else {each: {} for each in plan.backends}  # by backend id
        )
        self.pages: dict[bytes, tuple[PageContent, ...]] = {}  # by digest, of every page that L3 or a pool has had
        self._wanted: dict[tuple[int, bytes, int], tuple[list[PageContent], int]] = {}  # see `wanted`
        self.dropped_at = -math.inf  # when L3 lost a page for the last time
        self.slow_l3_s = 0.0
        self.stall_s = 0.0  # how much longer a copy takes that begins now
        self.failing_l3 = False
        self.refusing: set[str] = set()  # storages that open no segment
        self.armed: list[Fault] = []  # that strike when an operation of their kind is in flight
        self._log = log
        self._epochs = 1000
        self.network: Network = Network(self, plan)
        self.traffic: Traffic = Traffic(self)
        if first is None:
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
        self.replica = World(make_replica(plan), log, self) if plan.replica else None
        self.worlds = [self, self.replica] if self.replica is not None else [self]

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
                self.pages[digest] = parts
                for backend_id, store in self.l3.items():
                    if backend_id != "none" and self.rng.random() < 0.97:
                        store[digest] = StoredPage(parts, checksum(parts))

    def new_epoch(self) -> int:
        """Epochs rise over the whole run."""
        first = self.first
        first._epochs += 1
        return first._epochs

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

    def wanted(self, start: int, key: bytes, rank: int) -> tuple[list[PageContent], int]:
        """What a rank's pages hold for packed tokens that follow the hash `start`, and the hash after them."""
        known = self._wanted.get((start, key, rank))
        if known is None:
            size, slots = self.plan.settings.page_size, walk(start, unpack_list(key))
            own = of_rank(slots, rank)
            pages = [tuple(own[at : at + size]) for at in range(0, len(own), size)]
            known = self._wanted[start, key, rank] = (pages, slots[-1][1])
        return known

    def count_hits(self, usage: Usage) -> None:
        """Which tiers gave something."""
        for tier in ("device", "host", "storage"):
            self.seen[f"{tier}_hit"] += getattr(usage, f"{tier}_hit_tokens") > 0

    def run(self) -> None:
        """Traffic and faults, then peace until everything has ended."""
        self.seen.update(self.plan.shapes())
        for world in self.worlds:
            for number in range(world.plan.requests):
                self.clock.after(world._arrival(number), world._arrive)
        for fault in self.plan.faults:
            self.clock.after(fault.at, self._arm, fault)
        limit = self.plan.faults_end + SETTLE_S
        clock, peace = self.clock, self.plan.faults_end
        while clock.now < peace or not self._is_over():
            if not clock.step() or clock.now > limit or clock.steps > MAX_ACTIONS:
                self.fail(f"not over after {clock.steps} actions: {[checks.unfinished(each) for each in self.worlds]}")
            if clock.steps % NAMES_EVERY == 0:
                for world in self.worlds:
                    checks.check_names(world)
            if clock.steps % CHECK_EVERY == 0:
                for world in self.worlds:
                    checks.check_contents(world)
        for world in self.worlds:
            checks.check_contents(world)
            checks.check_end(world)

    def _arrival(self, number: int) -> float:
        burst = self.rng.random() < 0.3
        at = self.plan.traffic_s * number / self.plan.requests if burst else self.rng.uniform(0, self.plan.traffic_s)
        return 0.1 + at

    def _arrive(self) -> None:
        ask = self.traffic.draw()
        self.asks.append(ask)
        self.gateway.ask(ask)

    def _is_over(self) -> bool:
        return all(world.ended >= world.plan.requests and checks.is_quiet(world) for world in self.worlds)

    # --- faults -------------------------------------------------------------------------------------------------

    def _arm(self, fault: Fault) -> None:
        """The fault's time has come: it strikes now, or in the midst of the next operation of its kind."""
        if fault.during:
            self.armed.append(fault)
            self.clock.after(WAIT_S, self._strike_late, fault)
        else:
            self._strike(fault)

    def strike_armed(self) -> None:
        """A scheduler has sent commands: has a fault waited for one of them?"""
        for fault in list(self.armed):
            table = self._target(fault).shell.core.state.operations.table
            if any(type(operation).__name__ == fault.during for operation in table.values()):
                self.armed.remove(fault)
                self.seen[f"fault during {fault.during}"] += 1
                self.clock.after(self.rng.uniform(0.0, self.plan.copy_s), self._strike, fault)

    def _strike_late(self, fault: Fault) -> None:
        if fault in self.armed:
            self.armed.remove(fault)
            self._strike(fault)

    def _strike(self, fault: Fault) -> None:
        """A fault of storages hits them in both worlds, another one the world of its target."""
        self.note(f"*** {fault.kind} for {fault.seconds} s")
        self.seen[fault.kind] += 1
        for world in self.worlds if fault.kind in OF_STORAGES else [self._target(fault)]:
            world._suffer(fault)

    def _target(self, fault: Fault) -> "World":
        return self.worlds[fault.target // 3 % len(self.worlds)]

    def _suffer(self, fault: Fault) -> None:
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
        """A scheduler of the same identity starts. Workers and gateway are connected to it one after the other,
        storages follow the first one while they hear it. That one hangs for a while, or is killed in the end."""
        old = self.shell
        if not old.alive or old.paused:
            return
        self.old_shells.append(old)
        self.shell = Shell(self)
        for process in [*self.workers, *self.storages, self.gateway]:
            process.link = old
            if not process.holds_lease:
                self.clock.after(self.rng.uniform(0.0, seconds), setattr, process, "link", None)
        if self.rng.random() < 0.6:
            self.clock.after(self.rng.uniform(0.0, seconds), old.pause)
            self.clock.after(seconds + (MISSED_BEATS + 2) * self.plan.beat_s, old.resume)
        self.clock.after(seconds + (MISSED_BEATS + 3) * self.plan.beat_s, old.kill)

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
                for backend_id, store in self.l3.items():
                    self._corrupt(backend_id, store)
            case "corrupt_host":
                self._corrupt_host(fault.target)

    def drop_from_l3(self, backend_id: str, digests: list[bytes]) -> None:
        """A quota or a bad read takes pages; every storage with this L3 notices."""
        for digest in digests:
            self.l3[backend_id].pop(digest, None)
        self.dropped_at = self.clock.now
        for storage in (each for world in self.worlds for each in world.storages):
            if storage.alive and storage.backend_id == backend_id:
                storage.dropped += digests

    def _corrupt(self, backend_id: str, store: dict[bytes, StoredPage]) -> None:
        gone = []
        for digest in self.rng.sample(sorted(store), len(store) // 2):
            stored = store[digest]
            if self.rng.random() < 0.5:
                self.seen["l3_truncated"] += 1
                gone.append(digest)  # truncated: its header says so, and it is a miss
            else:
                store[digest] = stored._replace(parts=(*stored.parts[:-1], spoil(stored.parts[-1])))
        self.first.drop_from_l3(backend_id, gone)

    def _corrupt_host(self, target: int) -> None:
        segment = self.storages[target % len(self.storages)].current if self.storages else None
        names = sorted(page for page in segment.names if page in segment.leased) if segment is not None else []
        if segment is not None:
            rank = target % self.ranks
            for page in self.rng.sample(names, (len(names) + 1) // 2):
                segment.content[rank][page] = spoil(segment.content[rank][page])
                segment.spoilt.add(page)
