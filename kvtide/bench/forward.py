"""`kvtide bench forward`: decode steps of one request, alone and beside a background backup at the default pace.

A worker's engine runs in a process of its own: steps on its compute stream, WritePages on its write stream, into a pool
that another process owns.
"""

import asyncio
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from kvtide.bench.rig import DEADLINE_S, OWNER, answer, host_pool
from kvtide.bench.rows import Row, plain, times
from kvtide.stack import with_model
from services.gpu_worker.engine import Engine, build_engine
from services.gpu_worker.host_segment import HostSegment, MappedHostSegment
from services.gpu_worker.operations import Step, Write
from services.gpu_worker.streams import Event
from shared.config import Config
from shared.errors import KvtideError
from shared.link import new_epoch
from shared.messages.worker import RunStep, Sampling, StepDone, StepItem, WriteDone, WritePages
from shared.packed import pack

BACKUP_BYTES = 10**9
BATCH = 64  # pages of a command
PAGES = 4 * BATCH  # that a backup goes through, over and over: beyond the processor's own caches
CONTEXT = 1024  # tokens of the request at the start of each round
ALONE = 20  # steps
ROUNDS = 5
GOAL = 1.25  # times a step alone
ROUND_TIMEOUT_S = 600.0  # of the whole measurement, for a machine that is busy with something else
GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=0, choice=0, logprobs=0)


async def measure(config: Config, say: Callable[[str], None]) -> list[Row]:
    """One row, and the backup's speed. Raises KvtideError when there is no room for the pools."""
    config = await asyncio.to_thread(with_model, config, say)
    cache = replace(
        config.cache, device_tokens=(PAGES + 2 * CONTEXT // config.cache.page_size) * config.cache.page_size
    )
    config = replace(config, cache=cache, model=replace(config.model, dtype="bfloat16"))
    alone, beside, speeds = zip(*await asyncio.to_thread(_in_worker, config, say), strict=True)
    what = f"decode step, batch 1, {CONTEXT} tokens of context, bfloat16"
    return [
        times(f"{what}, beside a backup of 1 GB", "ms", "alone", beside, alone, at_most=GOAL),
        plain("the backup beside decode steps", "GB/s", speeds),
    ]


def _in_worker(config: Config, say: Callable[[str], None]) -> list[tuple[float, float, float]]:
    """(ms a step alone, ms a step beside a backup, GB/s of the backup) of each round."""
    # As the supervisor does for a worker: threads that spin while they wait starve the others.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("OMP_NUM_THREADS", str(config.worker.threads or len(os.sched_getaffinity(0))))
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, config))
    process.start()
    theirs.close()
    rounds: list[tuple[float, float, float]] = []
    try:
        for at in range(1 + ROUNDS):  # the first warms up
            say(f"round {at} of {ROUNDS}")
            if not ours.poll(ROUND_TIMEOUT_S):
                raise KvtideError(f"the worker didn't answer within {ROUND_TIMEOUT_S:g} s")
            rounds.append(answer(ours))
    finally:
        ours.close()
        process.join(DEADLINE_S)
    return rounds[1:]


def _work(parent: Connection, config: Config) -> None:
    """The worker's process: sends each round's figures."""
    try:
        engine = build_engine(config)
        folder = Path(config.storage.segment_folder)
        with host_pool(folder, engine.geometry, 1 + PAGES) as (_, info):
            segment = MappedHostSegment(info, OWNER, new_epoch())
            try:
                for _ in range(1 + ROUNDS):
                    parent.send(_round(engine, segment))
            finally:
                engine.close()
                segment.close()
    except KvtideError as error:
        parent.send(str(error))


def _round(engine: Engine, segment: HostSegment) -> tuple[float, float, float]:
    steps = _steps(engine)
    next(steps)  # the prompt
    alone = [next(steps) for _ in range(ALONE)]
    begun = time.perf_counter()
    last = _back_up(engine, segment)
    beside = []
    while not last.query():
        beside.append(next(steps))
    last.wait(DEADLINE_S)
    seconds = time.perf_counter() - begun
    return 1e3 * float(np.mean(alone)), 1e3 * float(np.mean(beside)), BACKUP_BYTES / 1e9 / seconds


def _steps(engine: Engine) -> Iterator[float]:
    """Seconds of one step after another of one request: the prompt, then a token each. It has pages above PAGES."""
    page_size, first = engine.geometry.page_size, 1 + PAGES
    pages = np.arange(first, first + 2 * CONTEXT // page_size)
    prompt = np.random.default_rng(1).integers(1000, 2000, CONTEXT)
    yield _step(engine, StepItem(1, 0, pack(prompt), 0, pack(pages), GREEDY))
    for start in range(CONTEXT, 2 * CONTEXT):
        yield _step(engine, StepItem(1, start, b"", 0, b"", GREEDY))


def _step(engine: Engine, item: StepItem) -> float:
    step = Step(RunStep(1, [item], []), 1, [], [], engine.compute.event(), engine.compute.event())
    done: list[object] = []
    engine.compute.submit(lambda: done.append(engine.stepper.run(step))).wait(DEADLINE_S)
    if not isinstance(done[0], StepDone):
        raise KvtideError(f"a step ended with {done[0]}")
    return done[0].compute_s


def _back_up(engine: Engine, segment: HostSegment) -> Event:
    """Queue WritePages of BACKUP_BYTES. The event is reached when the last has ended."""
    count = -(-BACKUP_BYTES // (BATCH * engine.geometry.page_bytes))
    commands = [_batch(at * BATCH % PAGES) for at in range(count)]
    events = [_write(engine, segment, pages) for pages in commands]
    return events[-1]


def _batch(first: int) -> Sequence[int]:
    return range(1 + first, 1 + first + BATCH)


def _write(engine: Engine, segment: HostSegment, pages: Sequence[int]) -> Event:
    ids = pack(np.array(pages))
    write = Write(WritePages(1, OWNER, segment.epoch, ids, ids), 1, segment, engine.pool.pages, [])

    def run() -> None:
        done = engine.transfers.write(write)
        if not isinstance(done, WriteDone):
            raise KvtideError(f"a write ended with {done}")

    return engine.writes.submit(run)
