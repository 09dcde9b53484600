"""The command line: `kvtide serve`, `status`, `why`, `flush`, `bench` and so on; docs/operations.md lists all."""

import argparse
import asyncio
import importlib
import json
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from kvtide.admin import ACTIONS, NEEDS_STORAGE
from kvtide.child import StackError
from kvtide.replay import command as replay
from kvtide.simulation import command as simulation
from shared.config import Config, load_config
from shared.errors import KvtideError
from shared.transport import use_keys

FAILED = 1
INTERRUPTED = 130  # what a shell reports for a program that Ctrl-C ended
TERMINATED = 143  # the same for SIGTERM

BENCHES = {  # each is `measure` of kvtide.bench.NAME
    "copy": "page copies between device and host pool, against a plain copy",
    "decode": "tokens a second, against memory bandwidth",
    "degraded": "time to first token without the storage, against a stack that never had one",
    "forward": "decode steps beside a background backup",
    "remote": "page copies over TCP, against a raw connection",
    "start": "from nothing to a first token, and the idle stack's processor time",
    "step": "what a decode step costs beside the model",
    "storage": "reads and writes of page files, against the raw disk",
    "ttft": "time to first token by the tier that has the prefix",
}

Command = Callable[[argparse.Namespace, Config], Coroutine[Any, Any, int]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 1 after a KvtideError (one line on stderr), 130 after Ctrl-C."""
    options = _parser().parse_args(arguments)
    if hasattr(options, "without_loop"):  # a computation: it needs neither a configuration nor an event loop
        return _compute(options)
    # To be terminated is the only end that a server has; for the other commands it means that they didn't finish.
    terminated = 0 if options.command is _serve else TERMINATED
    try:
        config = load_config(options.config, options.set)
        use_keys(config.run.keys_folder)
        return _run(options.command(options, config), terminated)
    except KvtideError as error:
        print(f"kvtide: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def _compute(options: argparse.Namespace) -> int:
    try:
        status: int = options.without_loop(options)
    except KvtideError as error:
        print(f"kvtide: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvtide", description="LLM serving from a KV cache over three tiers.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add(commands, "serve", _serve, "run the stack and serve the OpenAI API")
    _add(commands, "demo", _demo, "show what the tiers do: eight chats, a restart, an oracle", json=True)
    _add(commands, "status", _status, "ask a running stack how it is", json=True)
    events = _add(commands, "events", _events, "show which prefix lies in which tier, live, from KV events", json=True)
    events.add_argument("--once", action="store_true", help="show what a replay brings and end")
    why = _add(commands, "why", _why, "say which tier had an answer's prompt, or why none had it", json=True)
    why.add_argument("request_id", metavar="REQUEST_ID", help="id of an answer, such as chatcmpl-...")
    why.add_argument("--url", default="", help="of the gateway, when it isn't this configuration's own process")
    for action, text in ACTIONS.items():
        change = _add(commands, action, _administer, text, json=True)
        change.set_defaults(action=action, storage="")
        if action != "flush":
            given = None if action in NEEDS_STORAGE else "?"
            change.add_argument("storage", metavar="STORAGE", nargs=given, default="", help="such as storage-0")
    pin = _add(commands, "pin", _pin, "keep what is cached of a text for a time", json=True)
    pin.add_argument("file", type=Path, metavar="FILE", help="the text, as a completion's prompt")
    pin.add_argument("--salt", default="", help="cache_salt of the requests that are to find it")
    pin.add_argument("--ttl", type=float, default=3600.0, metavar="SECONDS", help="how long (default %(default)s)")
    pin.add_argument("--url", default="", help="of the gateway, when it isn't this configuration's own process")
    unpin = _add(commands, "unpin", _unpin, "let a pinned text go", json=True)
    unpin.add_argument("pin", type=int, metavar="PIN", help="the number that kvtide pin has said")
    _add(commands, "doctor", _doctor, "say whether the stack can run on this machine, and what to do", json=True)
    text = "make the keys that TCP links between hosts need"
    keys = commands.add_parser("keys", help=text, description=text[0].upper() + text[1:] + ".")
    keys.add_argument("folder", type=Path, metavar="FOLDER", help="a new folder; run.keys_folder then names it")
    keys.set_defaults(without_loop=_keys)
    simulation.add_parser(commands)
    replay.add_parser(commands)
    record = _add(commands, "record", _record, "write live traffic as a trace for replay: salted hashes, no text")
    record.add_argument("trace", type=Path, metavar="FILE.jsonl[.gz]", help="a new file")
    record.add_argument("--seconds", type=float, help="how long; default: until Ctrl-C")
    bench = commands.add_parser("bench", help="benchmarks", description="Benchmarks.")
    benches = bench.add_subparsers(required=True, metavar="BENCH")
    soak = _add(benches, "soak", _soak, "mixed load with aborts on tiny pools; looks for leaks", json=True)
    soak.add_argument("--seconds", type=float, default=60.0, help="how long the load lasts (default %(default)s)")
    soak.add_argument("--seed", type=int, default=1, help="of the load (default %(default)s)")
    tenants = _add(benches, "tenants", _tenants, "what one tenant can learn of another from times", json=True)
    tenants.add_argument("--seed", type=int, default=1, help="of the prompts (default %(default)s)")
    scale = _add(benches, "scale", _scale, "one storage, then three, then two, under load", json=True)
    scale.add_argument("--seconds", type=float, default=100.0, help="between two changes (default %(default)s)")
    scale.add_argument("--seed", type=int, default=1, help="of the prompts (default %(default)s)")
    scale.add_argument("--plot", type=Path, metavar="FILE.png", help="draw hit rates and placement over time")
    core = _add(benches, "core", _core, "the scheduler's core against SGLang's trees", json=True)
    core.add_argument("--peers", type=Path, required=True, metavar="FOLDER", help="made by bench/peers/setup FOLDER")
    chats = _add(benches, "serve", _bench_serve, "chats that come back, against llama.cpp and transformers", json=True)
    chats.add_argument(
        "--peers", type=Path, required=True, metavar="FOLDER", help="made by bench/peers/setup-serve FOLDER"
    )
    chats.add_argument("--sessions", type=int, default=16, help="chats that are open (default %(default)s)")
    chats.add_argument(
        "--turns", type=int, default=4, help="questions of each before the restart (default %(default)s)"
    )
    chats.add_argument("--clients", type=int, default=1, help="requests at a time (default %(default)s)")
    text = "share of all contexts that each engine's cache has room for (default %(default)s)"
    chats.add_argument("--memory", type=float, default=0.5, help=text)
    for name, text in BENCHES.items():
        each = _add(benches, name, _bench, text, json=True)
        each.set_defaults(bench=name)
        if name == "storage":
            each.add_argument("--peers", type=Path, metavar="FOLDER", help="made by bench/peers/setup FOLDER")
    return parser


def _add(commands: Any, name: str, command: Command, text: str, json: bool = False) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.set_defaults(command=command)
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file; its keys: docs/operations.md")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a key (repeatable)"
    )
    if json:
        parser.add_argument("--json", action="store_true", help="end with one line of JSON on stdout")
    return parser


def _run(command: Coroutine[Any, Any, int], terminated: int) -> int:
    """Run a command in an event loop that SIGINT and SIGTERM cancel, so that each `finally` gets its turn."""
    received: list[int] = []

    async def cancellable() -> int:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def cancel(number: int) -> None:
            received.append(number)
            task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, cancel, number)
        return await command

    try:
        return asyncio.run(cancellable())
    except asyncio.CancelledError:
        return INTERRUPTED if signal.SIGINT in received else terminated


def _keys(options: argparse.Namespace) -> int:
    from shared.keys import make_keys

    make_keys(options.folder)
    print(
        f"{options.folder}: server.key, server.pub, peer.key, peer.pub\n"
        "Scheduler and storages need all four, other hosts peer.key and server.pub. "
        f'Set run.keys_folder = "{options.folder}" everywhere; docs/security.md says more.'
    )
    return 0


async def _serve(options: argparse.Namespace, config: Config) -> int:
    from kvtide.serve import serve

    await serve(config, lambda line: print(f"kvtide: {line}", flush=True))
    return 0


async def _status(options: argparse.Namespace, config: Config) -> int:
    from rich.console import Console

    from kvtide.status import fetch_status, print_status

    status = await fetch_status(config.scheduler_endpoint)
    if options.json:
        print(json.dumps(status))
    else:
        print_status(status, Console())
    return 0


async def _events(options: argparse.Namespace, config: Config) -> int:
    from kvtide.events.command import show_events

    return await show_events(config, options.json, options.once)


async def _why(options: argparse.Namespace, config: Config) -> int:
    from rich.console import Console

    from kvtide.why import fetch_why, print_why

    answer = await fetch_why(config, options.request_id, options.url)
    if options.json:
        print(json.dumps(answer))
    else:
        print_why(answer, Console())
    return 0


async def _pin(options: argparse.Namespace, config: Config) -> int:
    from kvtide.admin import pin

    try:
        text = options.file.read_text(encoding="utf-8")
    except OSError as error:
        raise StackError(f"can't read {options.file}: {error.strerror}") from None
    figures = await pin(config, text, options.salt, options.ttl, options.url)
    print(json.dumps(figures) if options.json else f"pin {figures['pin']}: {figures['pages']} pages")
    return 0


async def _unpin(options: argparse.Namespace, config: Config) -> int:
    from kvtide.admin import administer

    await administer(config.scheduler_endpoint, "unpin", pin=options.pin)
    print(json.dumps({"pin": options.pin}) if options.json else f"pin {options.pin} has ended")
    return 0


async def _administer(options: argparse.Namespace, config: Config) -> int:
    from kvtide.admin import administer

    figures = await administer(config.scheduler_endpoint, options.action, options.storage)
    if options.json:
        print(json.dumps({"action": options.action, "storage": options.storage, **figures}))
    else:
        print(f"{options.action}: " + ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in figures.items()))
    return 0


async def _record(options: argparse.Namespace, config: Config) -> int:
    from kvtide.replay.record import record

    await record(config.scheduler_endpoint, options.trace, options.seconds, lambda line: print(line, flush=True))
    return 0


async def _doctor(options: argparse.Namespace, config: Config) -> int:
    from rich.console import Console

    from kvtide.doctor import as_json, diagnose, print_verdicts, worst

    verdicts = await asyncio.to_thread(diagnose, config)
    if options.json:
        print(as_json(verdicts))
    else:
        print_verdicts(verdicts, Console())
    return FAILED if worst(verdicts) == "fail" else 0


async def _demo(options: argparse.Namespace, config: Config) -> int:
    from kvtide.demo import run_demo

    return await run_demo(config, options.json)


async def _soak(options: argparse.Namespace, config: Config) -> int:
    from kvtide.bench.soak import run_soak

    return await run_soak(config, options.seconds, options.seed, options.json)


async def _tenants(options: argparse.Namespace, config: Config) -> int:
    from kvtide.bench.tenants import run_tenants

    return await run_tenants(config, options.seed, options.json)


async def _scale(options: argparse.Namespace, config: Config) -> int:
    from kvtide.bench.scale import run_scale

    return await run_scale(config, options.seconds, options.seed, options.plot, options.json)


async def _core(options: argparse.Namespace, config: Config) -> int:
    from kvtide.bench.core.command import run_core_bench

    return await asyncio.to_thread(run_core_bench, options.peers, options.json)


async def _bench_serve(options: argparse.Namespace, config: Config) -> int:
    from kvtide.bench.serve.command import Size, run_serve_bench

    size = Size(options.sessions, options.turns, options.clients, options.memory)
    return await run_serve_bench(config, options.peers.absolute(), size, options.json)


async def _bench(options: argparse.Namespace, config: Config) -> int:
    from kvtide.bench.rows import report
    from kvtide.progress import console, reporter

    module = importlib.import_module(f"kvtide.bench.{options.bench}")
    with reporter(console(stderr=options.json)) as progress:
        peers = {"peers": options.peers} if "peers" in options else {}
        rows = await module.measure(config, progress.say, **peers)
    return report(options.bench, rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
