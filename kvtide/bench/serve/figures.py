"""The rows of `kvtide bench serve`."""

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvtide.bench.rows import Row, plain
from kvtide.bench.serve.engines import Reply

AHEAD = "> 1"  # what a ratio is to be


class Run(NamedTuple):
    """One engine's answers, a list for each turn, and what its processes took."""

    turns: Sequence[Sequence[Reply]]
    restarted: Sequence[Reply]  # one more turn after the restart
    memory_bytes: int  # PSS of its processes after the turns


class Figures(NamedTuple):
    """What one engine did."""

    returning_ms: float  # median time to first token of the second turn and later ones
    restarted_ms: float  # the same of the turn after the restart
    prompt_rate: float  # prompt tokens of all turns over their times to first token
    decode_rate: float  # tokens after the first one over their time


def figures(run: Run) -> Figures:
    """The four figures of a run of two turns or more."""
    asked = [reply for turn in run.turns for reply in turn]
    later = [reply for turn in run.turns[1:] for reply in turn]
    decode_s = sum(reply.decode_s for reply in asked)
    return Figures(
        returning_ms=_p50_ms(later),
        restarted_ms=_p50_ms(run.restarted),
        prompt_rate=sum(reply.prompt_tokens for reply in asked) / sum(reply.ttft_s for reply in asked),
        decode_rate=sum(reply.tokens - 1 for reply in asked) / decode_s if decode_s else 0.0,
    )


def rows(ours: Run, peers: Mapping[str, Run], conditions: str) -> list[Row]:
    """Rows against each peer, then our own hits. conditions: what they have in common, for the reader."""
    made: list[Row] = []
    mine = figures(ours)
    last = len(ours.turns)
    returning, restarted = (
        f"TTFT p50 of turns 2 to {last}, {conditions}",
        f"TTFT p50 of turn {last + 1}, after a restart",
    )
    for name, run in peers.items():
        theirs = figures(run)
        made += [
            _less(returning, "ms", name, mine.returning_ms, theirs.returning_ms, AHEAD),
            _less(restarted, "ms", name, mine.restarted_ms, theirs.restarted_ms, AHEAD),
            _more(f"prompts, turns 1 to {last}", "tokens/s", name, mine.prompt_rate, theirs.prompt_rate, AHEAD),
            _more("decode of one answer", "tokens/s", name, mine.decode_rate, theirs.decode_rate),
            _less("memory of the processes (PSS)", "MB", name, ours.memory_bytes / 1e6, run.memory_bytes / 1e6),
        ]
    for what, replies in (
        (f"turns 2 to {last}", [reply for turn in ours.turns[1:] for reply in turn]),
        (f"turn {last + 1}, after a restart", ours.restarted),
    ):
        for tier in ("device", "host", "storage"):
            found = sum(getattr(reply, f"{tier}_tokens") for reply in replies)
            share = 100 * found / sum(reply.prompt_tokens for reply in replies)
            made.append(plain(f"prompt tokens found in {tier}, {what}", "%", [share]))
    return made


def _p50_ms(replies: Sequence[Reply]) -> float:
    return 1e3 * statistics.median(reply.ttft_s for reply in replies)


def _more(what: str, unit: str, peer: str, value: float, peer_value: float, goal: str | None = None) -> Row:
    """A rate: the ratio says how many times the peer's."""
    return _row(what, unit, peer, value, peer_value, value / peer_value if peer_value else None, goal)


def _less(what: str, unit: str, peer: str, value: float, peer_value: float, goal: str | None = None) -> Row:
    """A time or a size: the ratio says how many times ours the peer's is, so that more is better here too."""
    return _row(what, unit, peer, value, peer_value, peer_value / value, goal)


def _row(
    what: str, unit: str, peer: str, value: float, peer_value: float, ratio: float | None, goal: str | None
) -> Row:
    ok = None if goal is None or ratio is None else ratio > 1
    return Row(what, value, unit, peer, peer_value, ratio, goal, ok)
