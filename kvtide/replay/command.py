"""`kvtide replay`: the command line."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from services.scheduler.core.settings import CoreSettings
from shared.errors import TraceError

if TYPE_CHECKING:
    from kvtide.progress import Reporter
    from kvtide.replay.trace import Trace

SHOWN_BAD = 5  # bad lines printed in full


def choices(name: str) -> list[str]:
    """What a setting of the core may be."""
    return list(get_args(get_type_hints(CoreSettings)[name]))


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add `replay` to the command line."""
    text = "replay a trace of requests through the scheduler's core, beside the optimum"
    parser: argparse.ArgumentParser = subparsers.add_parser("replay", help=text, description=text + ".")
    parser.add_argument("trace", type=Path, metavar="TRACE", help="JSONL, gzipped or not; formats: docs/policies.md")
    parser.add_argument("--page-size", type=_positive, metavar="N", help="tokens; default: the trace's block size")
    parser.add_argument("--device-pages", type=_positive, required=True, metavar="N", help="pages in GPU memory (L1)")
    parser.add_argument("--host-pages", type=_pages, default=0, metavar="N", help="in host memory (L2); 0 = none")
    parser.add_argument("--storage-pages", type=_pages, default=0, metavar="N", help="in storage (L3); 0 = none")
    parser.add_argument("--eviction", choices=choices("eviction"), default="lru", help="(default %(default)s)")
    policies = choices("write_policy")
    parser.add_argument("--write-policy", choices=policies, default=policies[0], help="(default %(default)s)")
    parser.add_argument(
        "--partial-blocks", choices=("admit", "skip"), default="skip",
        help="is a request's partial last page cached? The live tree never holds one (default %(default)s)",
    )  # fmt: skip
    parser.add_argument("--skip-bad", action="store_true", help="leave lines out that are no request")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.set_defaults(without_loop=run)
    return parser


def _pages(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{number} is below 0")
    return number


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is below 1")
    return number


def run(args: argparse.Namespace) -> int:
    """Replay the trace; 0 when it ends. Raises TraceError when it can't be read or replayed."""
    from kvtide.progress import console, reporter
    from kvtide.replay.trace import read_trace

    if args.storage_pages and not args.host_pages:
        raise TraceError("storage pages come through host pages: give --host-pages above 0 too")
    trace = read_trace(args.trace, args.page_size, skip_bad=args.skip_bad)
    with reporter(console(stderr=True)) as progress:
        for line in trace.bad[:SHOWN_BAD]:
            progress.say(f"left out line {line.number}: {line.reason}")
        if len(trace.bad) > SHOWN_BAD:
            progress.say(f"left out {len(trace.bad) - SHOWN_BAD} more lines")
        result = _replay(args, trace, progress)
    if args.json:
        print(json.dumps(result), flush=True)
    return 0


def _replay(args: argparse.Namespace, trace: "Trace", progress: "Reporter") -> dict[str, Any]:
    from kvtide.progress import console
    from kvtide.replay.driver import pages_of, replay
    from kvtide.replay.optimum import Bounds
    from kvtide.replay.peers import Tiers
    from kvtide.replay.report import as_json, report, show

    pages = pages_of(trace, partial=args.partial_blocks == "admit")
    tiers = Tiers(args.device_pages, args.host_pages, args.storage_pages)
    progress.step("requests", len(trace.requests))
    outcome = replay(trace, pages, tiers, args.eviction, args.write_policy, progress.advance)
    bounds = Bounds(pages)
    found = report(trace, bounds, tiers, outcome, bounds.optimum(sum(tiers)))
    if not args.json:
        show(trace, bounds, found, None, console(stderr=False))
    return as_json(trace, found, None)
