"""What one seed means: sizes, settings, traffic and faults. Everything random about a run's shape is drawn here."""

import random
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, get_args

from services.scheduler.core.settings import CoreSettings, Eviction, LoadPolicy, WritePolicy

FaultKind = Literal[
    "kill_worker",
    "kill_storage",
    "kill_gateway",
    "kill_scheduler",
    "second_scheduler",
    "pause_worker",
    "pause_storage",
    "pause_scheduler",
    "cut_worker",
    "cut_storage",
    "zombie_worker",
    "stall_copy",
    "slow_l3",
    "failing_l3",
    "corrupt_l3",
    "corrupt_host",
    "refuse_segment",
]
LOADS: tuple[LoadPolicy, ...] = get_args(LoadPolicy)
EVICTIONS: tuple[Eviction, ...] = get_args(Eviction)
FAULT_KINDS: tuple[FaultKind, ...] = get_args(FaultKind)

DURING = ("", "", "Step", "Write", "Load", "Prefetch", "Archive")  # in whose midst faults are found that matter most
WAIT_S = 5.0  # until a fault strikes though nothing of its kind is in flight

POLICIES: list[WritePolicy] = [
    "write_through", "write_through", "write_through_selective", "write_back", "write_back",
]  # fmt: skip


@dataclass
class Fault:
    """One thing that goes wrong."""

    at: float  # seconds
    kind: FaultKind
    seconds: float  # how long it lasts (a killed process is away that long)
    target: int = 0  # which of the workers or storages
    during: str = ""  # a kind of operation: strike when one is in flight, at most WAIT_S late; "" = don't wait

    @property
    def end(self) -> float:
        """When it is over at the latest."""
        return self.at + self.seconds + (WAIT_S if self.during else 0.0)


@dataclass
class Plan:
    """The shape of one run."""

    seed: int
    settings: CoreSettings
    device_pages: int  # page 0 included
    host_pages: int  # page 0 included; 0 = no storage
    backends: list[str]  # of each storage the id of its L3, or "none"
    replica: bool  # another scheduler, with workers and a gateway of its own, shares the storages
    first_page: int  # of a segment
    joins: list[float]  # seconds at which each storage starts for the first time
    rows: int
    max_context: int  # tokens
    max_steps: int
    credits: int
    segment_budget: int  # segments that fit into the storage's budget
    requests: int
    traffic_s: float  # over which they arrive
    families: int
    l3_pages: int  # quota of each L3
    stored: float  # share of the families that L3 has from earlier
    abort_share: float
    beat_s: float  # heartbeat interval
    latency_s: float  # of a message, at most
    copy_s: float  # of a copy, at most
    step_s: float  # of a step, at most
    l3_s: float  # of an L3 batch, at most
    lose: float = 0.0  # share of messages between scheduler and worker or storage
    duplicate: float = 0.0
    late: float = 0.0  # share that others overtake, by up to LATE_S
    fail_step: float = 0.0  # share of operations that fail by themselves
    fail_copy: float = 0.0
    faults: list[Fault] = field(default_factory=list)

    def shapes(self) -> list[str]:
        """Names of what is special about it."""
        settings = self.settings
        first, *others = self.backends or ["none"]
        flags = {
            "replica": self.replica,
            "host pool smaller than device": 0 < self.host_pages < self.device_pages,
            "two steps in flight": self.max_steps > 1,
            "one L3 of several storages": first != "none" and first in others,
            "an L3 for each storage": bool(others) and first != "none" and first not in others,
            "without adoption": not settings.adoption,
            "shares of namespaces": settings.namespace_share < 1,
        }
        return [
            f"policy {settings.write_policy}",
            f"eviction {settings.eviction}",
            f"prefetch {settings.prefetch_policy if settings.prefetch else 'off'}",
            f"ranks {settings.tp_size}",
            f"page size {settings.page_size}",
            f"storages {len(self.backends)}",
            *(name for name, holds in flags.items() if holds),
        ]

    @cached_property
    def faults_end(self) -> float:
        """From then on everything works."""
        return max([self.traffic_s, *self.joins, *(fault.end for fault in self.faults)])


def make_plan(seed: int) -> Plan:
    """Draw a plan. One seed in three has no fault, one a few, one many."""
    rng = random.Random(f"plan {seed}")
    page_size = rng.choice([1, 2, 4])
    device_pages = rng.choice([rng.randint(5, 12), rng.randint(10, 30)])
    host_pages = 0 if rng.random() < 0.07 else rng.choice([rng.randint(3, 16), rng.randint(16, 100)])
    trouble = rng.choice([0, 0, 1, 1, 2, 2])
    settings = CoreSettings(
        page_size=page_size,
        write_policy=rng.choice(POLICIES),
        eviction=rng.choice(EVICTIONS),
        namespace_share=rng.choice([1.0, 1.0, 0.6, 0.3]),
        load_policy=rng.choice(LOADS),
        load_back_threshold=rng.choice([0, 1, 3, 6]),
        prefetch=rng.random() < 0.9,
        prefetch_threshold=rng.choice([0, 1, 2, 4]),
        prefetch_policy=rng.choice(["best_effort", "wait_complete", "timeout"]),
        host_tier=host_pages > 0,
        max_running=rng.randint(1, 6),
        max_queued=rng.choice([4, *[1024] * 7]),
        token_budget=rng.choice([2, 5, 8, 16, 64]),
        request_timeout_s=600.0,
        tp_size=rng.choice([1, 1, 1, 1, 2]),
        adoption=rng.random() < 0.9,
        events=rng.random() < 0.5,
        explain=rng.random() < 0.3,
        forget_storage_s=rng.choice([600.0, 20.0]),
    )
    plan = Plan(
        seed=seed,
        settings=settings,
        device_pages=device_pages,
        host_pages=host_pages,
        backends=[],
        replica=False,
        first_page=rng.choice([1, 1, 1, 2]),
        joins=[],
        rows=rng.randint(1, 6),
        max_context=rng.choice([(device_pages + 3) * page_size, max(4, device_pages * page_size // 2)]),
        max_steps=rng.choice([1, 1, 2]),
        credits=rng.choice([1, 2, 32]),
        segment_budget=rng.choice([1, 1, 2]),
        requests=rng.randint(6, 22),
        traffic_s=rng.choice([0.2, 1.0, 3.0, 10.0, 50.0]),
        families=rng.randint(2, 7),
        l3_pages=rng.choice([8, 16, 1000]),
        stored=rng.choice([0.0, 0.6, 1.0]),
        abort_share=rng.choice([0.0, 0.1, 0.4]),
        beat_s=rng.choice([1.0, 5.0]),
        latency_s=rng.choice([0.0005, 0.005, 0.02]),
        copy_s=rng.choice([0.005, 0.05, 0.3]),
        step_s=rng.choice([0.01, 0.05]),
        l3_s=rng.choice([0.005, 0.05, 0.6]),
    )
    if host_pages:
        _add_storages(plan, rng)
        plan.replica = rng.random() < 0.15
    if trouble:
        _add_faults(plan, rng, trouble)
    return plan


def make_replica(plan: Plan) -> Plan:
    """The other scheduler's plan: its own sizes, requests and network, the same model and storages."""
    rng = random.Random(f"replica {plan.seed}")
    settings = plan.settings._replace(
        identity="scheduler-1", write_policy=rng.choice(POLICIES), token_budget=rng.choice([5, 16])
    )
    return replace(
        plan, seed=-plan.seed - 1, settings=settings, replica=False, requests=rng.randint(3, 8), faults=[], rows=3,
        host_pages=rng.randint(3, 40), families=0,
    )  # fmt: skip


def _add_storages(plan: Plan, rng: random.Random) -> None:
    count = rng.choice([1, 1, 1, 2, 3])
    shared = rng.random() < 0.5
    for number in range(count):
        plan.backends.append("none" if rng.random() < 0.2 else "l3" if shared else f"l3-{number}")
        plan.joins.append(rng.uniform(0.0, plan.traffic_s) if number and rng.random() < 0.3 else 0.0)


def _add_faults(plan: Plan, rng: random.Random, trouble: int) -> None:
    if rng.random() < 0.5:
        plan.lose = rng.choice([0.0, 0.005, 0.05])
        plan.duplicate = rng.choice([0.0, 0.02, 0.1])
        plan.late = rng.choice([0.0, 0.0, 0.005, 0.03])
    if rng.random() < 0.4:
        plan.fail_step = rng.choice([0.02, 0.15])
    if rng.random() < 0.4:
        plan.fail_copy = rng.choice([0.02, 0.15])
    kinds: list[FaultKind] = [*FAULT_KINDS, "kill_scheduler", "kill_scheduler", "kill_scheduler"]
    for _ in range(rng.randint(1, 2) if trouble == 1 else rng.randint(2, 7)):
        kind, seconds, during = rng.choice(kinds), rng.choice([0.05, 0.5, 4.0, 20.0, 45.0]), rng.choice(DURING)
        at = rng.uniform(0.05, plan.traffic_s * 1.2)
        if kind == "kill_scheduler":  # while there are requests, so that a successor finds something to adopt
            at, seconds, during = at / 2, min(seconds, 0.5), rng.choice(["Prefetch", "Prefetch", "Write", during])
        plan.faults.append(Fault(at, kind, seconds, rng.randrange(6), during))
