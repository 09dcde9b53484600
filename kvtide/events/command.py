"""`kvtide events`: a live map on a terminal, or each event as a line of JSON."""

import asyncio
import json
from collections.abc import Callable, Iterable
from contextlib import aclosing, suppress
from itertools import islice
from pathlib import Path

from msgspec.structs import asdict
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text
from tokenizers import Tokenizer

from kvtide.child import StackError
from kvtide.events.block_map import TIERS, BlockMap
from kvtide.events.subscription import Subscription
from kvtide.stack import with_model
from shared.config import Config
from shared.messages.events import KVCacheEvent

REFRESH_S = 0.25  # between two pictures: as fast as a person reads
SHOWN_TOKENS = 24  # of a part's beginning: a line of text
SHOWN_PARTS = 200  # of the map with --once; a live one shows a screen

Decode = Callable[[list[int]], str]


async def show_events(config: Config, as_json: bool, once: bool) -> int:
    """Follow the scheduler's KV events until cancelled; with `once`, show what a replay brings and end.

    Raises StackError when events are off or nobody publishes them.
    """
    events = config.events
    if not events.endpoint or (once and not events.replay_endpoint):
        raise StackError(
            "events.endpoint is empty, or events.replay_endpoint with --once: give the stack and this command "
            "--set events.endpoint=tcp://127.0.0.1:5557 --set events.replay_endpoint=tcp://127.0.0.1:5558"
        )
    subscription = Subscription(events)
    try:
        if as_json:
            await _print_lines(subscription, once)
        else:
            await _show_map(subscription, once, await asyncio.to_thread(_decoder, config))
    finally:
        subscription.close()
    return 0


def _decoder(config: Config) -> Decode:
    tokenizer = Tokenizer.from_file(str(Path(with_model(config).model.path) / "tokenizer.json"))
    return lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=False))


async def _print_lines(subscription: Subscription, once: bool) -> None:
    if once:
        for events in await subscription.history():
            _print(events)
        return
    async with aclosing(subscription.batches()) as batches:
        async for events in batches:
            _print(events)


def _print(events: Iterable[KVCacheEvent]) -> None:
    for event in events:
        print(json.dumps({"event": type(event).__name__, **asdict(event)}), flush=True)


async def _show_map(subscription: Subscription, once: bool, decode: Decode) -> None:
    known, console = BlockMap(), Console()
    if once:
        for events in await subscription.history():
            known.apply(events)
        console.print(picture(known, decode, SHOWN_PARTS))
        return
    following = asyncio.create_task(_follow(subscription, known))
    try:
        with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
            while not following.done():
                live.update(picture(known, decode, max(1, console.height - 4)), refresh=True)
                await asyncio.wait([following], timeout=REFRESH_S)
            following.result()
    finally:
        following.cancel()
        with suppress(asyncio.CancelledError):
            await following


async def _follow(subscription: Subscription, known: BlockMap) -> None:
    async with aclosing(subscription.batches()) as batches:
        async for events in batches:
            known.apply(events)


def picture(known: BlockMap, decode: Decode, most: int) -> RenderableType:
    """The first `most` parts of the map, prefixes indented below what they share."""
    totals = "  ".join(f"{tier} {count}" for tier, count in known.pages().items() if count)
    table = Table("prefix", *TIERS, "tokens", box=None, pad_edge=False, expand=True)
    for column in table.columns:
        column.no_wrap, column.overflow = True, "ellipsis"
    table.columns[0].ratio = 1
    parts = known.parts()
    for part in islice(parts, most):
        begin = " ".join(decode(part.tokens[:SHOWN_TOKENS]).split())
        marks = [str(part.pages) if tier in part.tiers else "-" for tier in TIERS]
        table.add_row(Text("  " * part.depth + begin), *marks, f"{part.start}..{part.start + len(part.tokens)}")
    more = sum(1 for _ in parts)
    rest = [Text(f"and {more} more")] if more else []
    return Group(Text(f"pages: {totals or 'none'}"), table, *rest)
