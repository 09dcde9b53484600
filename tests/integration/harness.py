"""What the tests with a real stack share: a small configuration, prompts, a check of everything that was emitted."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from kvtide.chat_client import Answer, client, complete
from kvtide.demo.plan import documents
from kvtide.stack import Stack, with_model
from kvtide.tiers import geometry_of
from shared.config import Cache, Config, Gateway, Model, Run
from shared.config import Storage as StorageSection

PAGE_TOKENS = 16
DEVICE_TOKENS = 768  # two or three of the prompts below, so that a few others evict one
HOST_TOKENS = 4096  # all of them
PROMPT_CHARS = 900  # about 200 tokens
MAX_TOKENS = 6
READY_TIMEOUT_S = 60.0
IDLE_TIMEOUT_S = 30.0  # the deadline of the project's own promise: an idle stack holds nothing 30 s after a fault


def small_config(folder: Path, **cache: Any) -> Config:
    """A small float32 stack in `folder`; `cache` overrides keys of [cache]."""
    config = Config(
        run=Run(name=folder.name.lower(), folder=str(folder / "run")),
        model=Model(dtype="float32"),
        cache=Cache(
            page_size=PAGE_TOKENS,
            device_tokens=DEVICE_TOKENS,
            prefetch_threshold=2 * PAGE_TOKENS,
            prefetch_policy="wait_complete",
        ),
        storage=StorageSection(folder=str(folder / "l3")),
        gateway=Gateway(port=0),
    )
    config = with_model(config)
    host_bytes = HOST_TOKENS * geometry_of(config).token_bytes
    return replace(config, cache=replace(config.cache, **{"host_bytes": host_bytes, **cache}))


def prompt(number: int) -> str:
    """A text of about 200 tokens; different numbers differ from the first page on."""
    texts = documents()
    turn, which = divmod(number, len(texts))
    start = turn * PROMPT_CHARS
    assert start + PROMPT_CHARS <= len(texts[which].text), f"there is no prompt {number}"
    return f"Text {number}. {texts[which].text[start : start + PROMPT_CHARS]}"


async def ask(stack: Stack, text: str | list[int], **options: Any) -> Answer:
    """One greedy completion."""
    async with client(stack.url) as http:
        return await complete(http, stack.config.model.name, text, **{"max_tokens": MAX_TOKENS, **options})


async def ask_each(stack: Stack, numbers: Iterable[int]) -> list[Answer]:
    """The prompts of these numbers, one after the other."""
    return [await ask(stack, prompt(number)) for number in numbers]


async def settle(stack: Stack) -> dict[str, Any]:
    """Wait until the stack is idle: what was asked is in all tiers. Fails when it doesn't become so, or is unsound."""
    status = await stack.wait_idle(IDLE_TIMEOUT_S)
    held = {key: status[key] for key in ("locked", "in_flight", "quarantined", "integrity")}
    assert held == {"locked": 0, "in_flight": 0, "quarantined": 0, "integrity": "ok"}, json.dumps(status)
    return status
