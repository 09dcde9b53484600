"""`kvtide demo`: what three tiers do for eight chats, and a proof that their answers are right."""

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console

from kvtide.demo.chats import Session, ask_all
from kvtide.demo.figures import Phase, Result, summarize, table
from kvtide.demo.plan import QUESTIONS, TURNS, demo_config, documents
from kvtide.oracle import GAP_LIMIT, LOGPROB_LIMIT, Verdict, group
from kvtide.oracle_process import running_oracle
from kvtide.private_folder import private_folder
from kvtide.progress import Reporter, console, reporter
from kvtide.stack import running_stack, with_model
from kvtide.tiers import describe_tiers
from shared.config import Config

READY_TIMEOUT_S = 120.0  # a start takes about 5 s; a machine that is busy with something else may take 60
IDLE_TIMEOUT_S = 60.0  # the last pages of 400 MB reach their files within 10 s on a slow disk

__all__ = ["run_demo"]


@dataclass(frozen=True)
class _Run:
    tiered: Phase
    restarted: Phase
    device_only: Phase
    chats: list[Session]  # of the tiered phases
    plain_chats: list[Session]  # of the other

    @property
    def phases(self) -> tuple[Phase, ...]:
        return self.tiered, self.restarted, self.device_only


async def run_demo(config: Config, as_json: bool) -> int:
    """Run the demo; returns the exit status: 0 when every token is right. Leaves nothing on disk."""
    started = time.monotonic()
    screen = console(stderr=as_json)
    with private_folder("kvtide-demo-") as folder, reporter(screen) as progress:
        config = await asyncio.to_thread(with_model, config, progress.say)
        run = await _run_phases(config, folder, progress)
        verdict = await _check(config, run, progress)
    result = summarize(
        run.tiered,
        run.restarted,
        _later(run.chats),
        _later(run.plain_chats),
        len(run.chats),
        verdict,
        time.monotonic() - started,
    )
    screen.print(table(run.phases))
    _explain(screen, result, verdict)
    if as_json:
        print(msgspec.json.encode(result).decode(), flush=True)
    return 1 if result.tokens_wrong else 0


async def _run_phases(config: Config, folder: Path, progress: Reporter) -> _Run:
    chats, plain_chats = ([Session(document) for document in documents()] for _ in range(2))
    tiered, device_only = (demo_config(config, folder, tiered) for tiered in (True, False))
    for line in describe_tiers(tiered):
        progress.say(line)
    return _Run(
        await _phase("three tiers, turns 1-4", tiered, chats, TURNS, progress),
        await _phase("restarted, turn 5", tiered, chats, 1, progress),
        await _phase("device only, turns 1-4", device_only, plain_chats, TURNS, progress),
        chats,
        plain_chats,
    )


async def _phase(name: str, config: Config, sessions: list[Session], turns: int, progress: Reporter) -> Phase:
    async with running_stack(config) as stack:
        await stack.wait_ready(READY_TIMEOUT_S)
        progress.step(name, turns * len(sessions))
        answers = await ask_all(stack, sessions, turns, progress.advance)
        status = await stack.wait_idle(IDLE_TIMEOUT_S)  # the last pages are in their files then
        if status["integrity"] != "ok":
            progress.say(f"integrity: {status['integrity']}")
    return Phase(name, answers)


async def _check(config: Config, run: _Run, progress: Reporter) -> Verdict:
    emitted = [answer.emitted for phase in run.phases for answer in phase.answers]
    progress.step("oracle, tokens read anew", sum(len(each.text) for each in group(emitted)))
    async with running_oracle(Path(config.model.path)) as oracle:
        return await oracle.check(emitted, lambda read, total: progress.advance(read))


def _later(sessions: list[Session]) -> list[float]:
    return [answer.ttft_s for session in sessions for answer in session.answers[1:TURNS]]


def _explain(screen: Console, result: Result, verdict: Verdict) -> None:
    files = result.after_restart_storage_hit_tokens
    worst = f"{verdict.worst_gap:.1e} below the best logit (limit {GAP_LIMIT:g})"
    lines = [
        f"Turns 2 to {TURNS}: median time to first token {result.ttft_speedup_p50:g} times shorter with three tiers.",
        f"Turn {len(QUESTIONS)}, after the restart: {files:,} prompt tokens came from page files.",
        f"Oracle: {result.tokens_wrong} of {result.tokens_checked:,} emitted tokens are wrong.",
        f"Worst token: {worst}, logprob off by {verdict.worst_difference:.1e} (limit {LOGPROB_LIMIT:g}).",
    ]
    for line in lines:
        screen.print(line, highlight=False, soft_wrap=True)
