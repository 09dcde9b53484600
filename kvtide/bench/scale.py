"""`kvtide bench scale`: one storage, then three, then two by a drain, under the load of returning sessions.

No request may fail, and a minute after each change no window's hit rate may be 5 points lower than before it.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
from msgspec.structs import replace

from kvtide.admin import administer
from kvtide.bench.scale_figures import Change, Placement, low_s, plot, rates
from kvtide.bench.scale_load import CLIENTS, LIVE_TOKENS, SESSIONS, Load
from kvtide.bench.step import READY_TIMEOUT_S, private
from kvtide.chat_client import client
from kvtide.child import StackError
from kvtide.private_folder import private_folder
from kvtide.progress import console, reporter
from kvtide.replay.plot import need_matplotlib
from kvtide.stack import Stack, more_storages, running_stack, with_model
from kvtide.supervisor import Supervisor
from kvtide.tiers import geometry_of
from shared.config import Config

PAGE_TOKENS = 16
DEVICE_TOKENS = 1536  # an eighth of the live tokens, and room for CLIENTS prompts
HOST_TOKENS = LIVE_TOKENS // 3  # of one storage
PREFETCH_THRESHOLD = 32  # tokens; short prompts are to take part
ADDED = (1, 2)  # numbers of the storages that join
DRAINED = "storage-1"
BEFORE_S = 40.0  # before a change, to compare with
SETTLE_S = 60.0  # after a change, in which the hit rate may be low
POLL_S = 2.0  # of the placement
CHANGE_TIMEOUT_S = 60.0  # a storage starts, or is empty, within seconds


class Result(msgspec.Struct, frozen=True):
    """The line of JSON. A `low_s` is seconds after a change until no 20 s were 5 points lower than before it."""

    bench: str
    requests: int
    errors: int
    hit_rate: list[float]  # in the last BEFORE_S with one storage, with three, with two
    host_hit_rate: list[float]
    low_s: list[float]  # after the two joined, after the drain
    moved_pages: list[int]  # cached host pages by storage, at the end of the three


async def run_scale(config: Config, seconds: float, seed: int, picture: Path | None, as_json: bool) -> int:
    """Run it with `seconds` between two changes; returns the exit status: 0 when nothing failed and nothing was low."""
    if seconds < SETTLE_S + BEFORE_S / 2:
        raise StackError(f"--seconds {seconds:g} is too short to see what a change does: give {SETTLE_S + BEFORE_S:g}")
    if picture is not None:
        need_matplotlib()
    screen = console(stderr=as_json)
    with private_folder("kvtide-scale-") as folder, reporter(screen) as progress:
        config = _sized(private(await asyncio.to_thread(with_model, config, progress.say), folder))
        async with running_stack(config, report=progress.say) as stack:
            await stack.wait_ready(READY_TIMEOUT_S)
            run = Run(stack, seconds, progress.say)
            await run.run(seed)
    result = run.result()
    for error in run.load.errors[:5]:
        screen.print(f"error: {error}", highlight=False, markup=False, soft_wrap=True)
    names = ("one storage", "three", "two")
    for name, total, host in zip(names, result.hit_rate, result.host_hit_rate, strict=True):
        screen.print(f"{name}: hit rate {total:.3f}, {host:.3f} of it in host memory", highlight=False)
    screen.print(
        f"{result.requests} requests, {result.errors} errors; low for {result.low_s[0]:g} s after two joined, "
        f"for {result.low_s[1]:g} s after one was drained",
        highlight=False,
    )
    if picture is not None:
        plot(run.load.answered, run.placements, run.changes, (run.begun_s, run.ended_s), picture)
    if as_json:
        print(msgspec.json.encode(result).decode(), flush=True)
    return 1 if result.errors or max(result.low_s) > SETTLE_S else 0


def _sized(config: Config) -> Config:
    cache = replace(
        config.cache, page_size=PAGE_TOKENS, device_tokens=DEVICE_TOKENS, prefetch_threshold=PREFETCH_THRESHOLD
    )
    config = replace(config, cache=cache, model=replace(config.model, dtype="float32"))
    return replace(config, cache=replace(cache, host_bytes=HOST_TOKENS * geometry_of(config).token_bytes))


class Run:
    """The load and the changes."""

    load: Load

    def __init__(self, stack: Stack, seconds: float, say: Callable[[str], None]) -> None:
        self.changes: list[Change] = []
        self.placements: list[Placement] = []
        self.begun_s = self.ended_s = 0.0
        self._stack = stack
        self._seconds = seconds
        self._say = say

    async def run(self, seed: int) -> None:
        """Warm up, then one, three and two storages. Raises StackError when a change isn't made in time."""
        async with client(self._stack.url) as http, AsyncExitStack() as more:
            self.load = Load(http, self._stack.config.model.name, seed)
            self._say(f"{SESSIONS} sessions, {LIVE_TOKENS:,} live tokens, {CLIENTS} at a time; warming up")
            steps = (self.load.run(), self._watch(), self._stack.watch(), self._carry_out(more))
            running = [asyncio.create_task(step) for step in steps]
            try:  # only the last one ends, if all is well
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)

    async def _carry_out(self, more: AsyncExitStack) -> None:
        await self.load.warmed_up.wait()
        self._say("one storage")
        self.begun_s = time.monotonic()
        await asyncio.sleep(self._seconds)
        self._changed("two join")
        added = await more.enter_async_context(more_storages(self._stack, ADDED, self._say))
        await self._until(lambda host: all(host.get(each, {}).get("usable") for each in added.children), "joined")
        await asyncio.sleep(self._seconds)
        self._changed("one is drained")
        await self._drain(added)
        await asyncio.sleep(self._seconds)
        self.ended_s = time.monotonic()

    async def _drain(self, added: Supervisor) -> None:
        await administer(self._stack.config.scheduler_endpoint, "drain", DRAINED)
        await self._until(lambda host: not any(host[DRAINED][key] for key in ("cached", "pinned", "in_flight")), "left")
        await added.children[DRAINED].stop()

    async def _until(self, done: Callable[[dict[str, dict[str, int]]], bool], what: str) -> None:
        deadline = time.monotonic() + CHANGE_TIMEOUT_S
        while not done((await self._stack.status())["host"]):
            if time.monotonic() > deadline:
                raise StackError(f"the storages have not {what} within {CHANGE_TIMEOUT_S:g} s; their logs say why")
            await asyncio.sleep(POLL_S / 4)
        self._say(f"{what} after {time.monotonic() - self.changes[-1].at_s:.1f} s")

    async def _watch(self) -> None:
        while True:
            pages = {storage: pool["cached"] for storage, pool in (await self._stack.status())["host"].items()}
            self.placements.append(Placement(time.monotonic(), pages))
            await asyncio.sleep(POLL_S)

    def _changed(self, what: str) -> None:
        self.changes.append(Change(time.monotonic(), what))
        before = rates(self.load.answered, self.changes[-1].at_s - BEFORE_S, self.changes[-1].at_s)
        self._say(f"hit rate {before.total:.3f}; now {what}")

    def result(self) -> Result:
        """What came of it."""
        answered, joined_s, drained_s = self.load.answered, self.changes[0].at_s, self.changes[1].at_s
        phases = [rates(answered, end_s - BEFORE_S, end_s) for end_s in (joined_s, drained_s, self.ended_s)]
        three = [each.pages for each in self.placements if each.at_s <= drained_s][-1]
        return Result(
            bench="scale",
            requests=len(answered),
            errors=len(self.load.errors),
            hit_rate=[round(each.total, 3) for each in phases],
            host_hit_rate=[round(each.host, 3) for each in phases],
            low_s=[
                low_s(answered, joined_s, drained_s, phases[0].total),
                low_s(answered, drained_s, self.ended_s, phases[1].total),
            ],
            moved_pages=[three[storage] for storage in sorted(three)],
        )
