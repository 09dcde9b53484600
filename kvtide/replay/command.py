"""`kvtide replay`: the command line."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from kvtide.replay.costs import PRESETS, Speeds
from services.scheduler.core.settings import Eviction, WritePolicy
from shared.errors import TraceError

if TYPE_CHECKING:
    from rich.console import Console

    from kvtide.replay.studies import Study

SHOWN_BAD = 5  # bad lines printed in full
DEFAULT_PRESET = "8b-h100"


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add `replay` to the command line."""
    text = "replay a trace of requests through the scheduler's core, beside the optimum"
    parser: argparse.ArgumentParser = subparsers.add_parser("replay", help=text, description=text + ".")
    parser.add_argument("trace", type=Path, metavar="TRACE", help="JSONL, gzipped or not; formats: docs/policies.md")
    parser.add_argument("--page-size", type=_positive, metavar="N", help="tokens; default: the trace's block size")
    parser.add_argument("--device-pages", type=_pages, default=0, metavar="N", help="in GPU memory (L1)")
    parser.add_argument("--host-pages", type=_pages, default=0, metavar="N", help="in host memory (L2); 0 = none")
    parser.add_argument("--storage-pages", type=_pages, default=0, metavar="N", help="in storage (L3); 0 = none")
    parser.add_argument("--eviction", choices=get_args(Eviction), default="lru", help="(default %(default)s)")
    policies = get_args(WritePolicy)
    parser.add_argument("--write-policy", choices=policies, default=policies[0], help="(default %(default)s)")
    parser.add_argument(
        "--partial-blocks", choices=("admit", "skip"), default="skip",
        help="is a request's partial last page cached? The live tree never holds one (default %(default)s)",
    )  # fmt: skip
    parser.add_argument("--skip-bad", action="store_true", help="leave lines out that are no request")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    _add_studies(parser)
    parser.set_defaults(without_loop=run)
    return parser


def _add_studies(parser: argparse.ArgumentParser) -> None:
    studies = parser.add_argument_group("many replays")
    studies.add_argument("--compare", action="store_true", help="all strategies and write policies side by side")
    studies.add_argument(
        "--plot", type=Path, metavar="FILE.png",
        help="hit rate over capacity, L1 alone; with --compare of all strategies",
    )  # fmt: skip
    studies.add_argument(
        "--sweep", type=_rate, metavar="RATE", help="the smallest sizes for this hit rate over the last half"
    )
    timed = parser.add_argument_group("time to first token")
    timed.add_argument(
        "--concurrency", type=_positive, metavar="N", help="replay by timestamp, N requests at once at most"
    )
    timed.add_argument("--preset", choices=PRESETS, default=DEFAULT_PRESET, help="speeds (default %(default)s)")
    timed.add_argument("--prefill", type=_speed, metavar="TOKENS_PER_S", help="of the model")
    timed.add_argument("--copy", type=_speed, metavar="GB_PER_S", help="between host and device, each way")
    timed.add_argument("--disk", type=_speed, metavar="GB_PER_S", help="of L3, each way")
    timed.add_argument("--kv-bytes", type=_positive, metavar="N", help="bytes of a token's K/V over all layers")


def _number(text: str, least: int) -> int:
    number = int(text)
    if number < least:
        raise argparse.ArgumentTypeError(f"{number} is below {least}")
    return number


def _pages(text: str) -> int:
    return _number(text, 0)


def _positive(text: str) -> int:
    return _number(text, 1)


def _speed(text: str) -> float:
    speed = float(text)
    if not 0 < speed < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no speed; give a number above 0")
    return speed


def _rate(text: str) -> float:
    rate = float(text)
    if not 0 < rate <= 1:
        raise argparse.ArgumentTypeError(f"{text} is no hit rate; give a number above 0, up to 1")
    return rate


def run(args: argparse.Namespace) -> int:
    """Replay the trace; 0 when it ends. Raises TraceError when it can't be read or replayed."""
    from kvtide.progress import console, reporter
    from kvtide.replay.driver import pages_of
    from kvtide.replay.optimum import Bounds
    from kvtide.replay.studies import Study
    from kvtide.replay.trace import read_trace

    _check(args)
    trace = read_trace(args.trace, args.page_size, skip_bad=args.skip_bad)
    pages = pages_of(trace, partial=args.partial_blocks == "admit")
    with reporter(console(stderr=True)) as progress:
        for line in trace.bad[:SHOWN_BAD]:
            progress.say(f"left out line {line.number}: {line.reason}")
        if len(trace.bad) > SHOWN_BAD:
            progress.say(f"left out {len(trace.bad) - SHOWN_BAD} more lines")
        out = None if args.json else console(stderr=False)
        result = _carry_out(args, Study(trace, pages, Bounds(pages), progress), out)
    if args.json:
        print(json.dumps(result), flush=True)
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.storage_pages and not args.host_pages:
        raise TraceError("storage pages come through host pages: give --host-pages above 0 too")
    alone = args.plot is not None or args.sweep is not None  # they find their own sizes
    if not args.device_pages and (args.host_pages or args.concurrency or not alone):
        raise TraceError("a replay needs device memory: give --device-pages above 0 (--plot and --sweep don't need it)")
    if args.plot is not None:
        from kvtide.replay.plot import need_matplotlib

        need_matplotlib()


def _carry_out(args: argparse.Namespace, study: "Study", out: "Console | None") -> dict[str, Any]:
    """Everything that was asked for; the single replay's numbers are the object's own."""
    from kvtide.replay import studies
    from kvtide.replay.peers import Tiers

    tiers = Tiers(args.device_pages, args.host_pages, args.storage_pages)
    chosen = list(get_args(Eviction)) if args.compare else [args.eviction]
    result: dict[str, Any] = {"trace": study.trace.name, "requests": len(study.trace.requests)}
    if tiers.device:
        result = _replay(args, study, tiers, out)
    if args.compare and tiers.device:
        rows = studies.compare(study, tiers, chosen, list(get_args(WritePolicy)), speeds(args).kv_bytes)
        result["compare"] = rows
        if out is not None:
            studies.show_comparison(rows, out)
    if args.plot is not None:
        from kvtide.replay.plot import plot

        curve = studies.curve(study, chosen, args.write_policy)
        plot(study.trace, curve, args.plot)
        result["curve"] = curve._asdict()
        study.progress.say(f"drawn: {args.plot}")
    if args.sweep is not None:
        result["sweep"] = studies.sweep(study, args.sweep, tiers, args.eviction, args.write_policy)
        if out is not None:
            studies.show_sweep(result["sweep"], out)
    return result


def _replay(args: argparse.Namespace, study: "Study", tiers: Any, out: "Console | None") -> dict[str, Any]:
    from kvtide.replay.driver import replay
    from kvtide.replay.report import as_json, report, show
    from kvtide.replay.timed import replay_by_time

    trace, pages, bounds, progress = study
    progress.step("requests", len(pages))
    policies = args.eviction, args.write_policy
    ttft = None
    if args.concurrency is None:
        outcome = replay(trace, pages, tiers, *policies, progress.advance)
    else:
        outcome, ttft = replay_by_time(trace, pages, tiers, *policies, args.concurrency, speeds(args), progress.advance)
    found = report(trace, bounds, tiers, outcome, bounds.optimum(sum(tiers)))
    if out is not None:
        show(trace, bounds, found, ttft, out)
    return as_json(trace, found, ttft)


def speeds(args: argparse.Namespace) -> Speeds:
    """The preset's speeds, with those that were given."""
    given = {name: getattr(args, name) for name in Speeds._fields if getattr(args, name) is not None}
    return PRESETS[args.preset]._replace(**given)
