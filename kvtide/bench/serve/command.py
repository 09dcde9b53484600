"""`kvtide bench serve --peers FOLDER`: sixteen chats of four turns, a restart, a fifth turn, with three engines.

The engines take turns: each answers a whole turn of all sessions before the chats go on, so that a busy machine
disturbs all of them alike.
"""

import asyncio
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from kvtide.bench.memory import proportional_set_size
from kvtide.bench.rows import Row, report
from kvtide.bench.serve.engines import Engine, Reply, kvtide, llama_server, peer, python_of, transformers_server
from kvtide.bench.serve.figures import Run, rows
from kvtide.bench.serve.plan import MAX_TOKENS, MOST_SESSIONS, Chat, Messages, budget, order
from kvtide.bench.step import private
from kvtide.child import Report, StackError
from kvtide.default_model.source import find_source
from kvtide.private_folder import private_folder
from kvtide.progress import console, reporter
from kvtide.stack import with_model
from kvtide.tiers import geometry_of
from services.gateway.model import Model
from shared.config import Config

OURS, LLAMA, TRANSFORMERS = "kvtide", "llama-cpp-python's server", "transformers' generate"


class Size(NamedTuple):
    """What the command line says."""

    sessions: int
    turns: int  # before the restart
    clients: int  # requests at a time
    memory: float  # share of all contexts that a side's cache has room for


Start = Callable[[], AbstractAsyncContextManager[Engine]]


class Words:
    """Counts the tokens of engines that don't say how many there were."""

    def __init__(self, config: Config) -> None:
        """Raises ModelError when the model's folder has no tokenizer or chat template."""
        model = Model(config)
        if model.chat_template is None:
            raise StackError(f"{model.folder} has no chat template; remove it, it is made again")
        self._tokenizer, self._template = model.tokenizer, model.chat_template

    def of_prompt(self, messages: Messages) -> int:
        """Tokens of a chat, with the template around it."""
        return self.of_text(self._template.render(list(messages)))

    def of_text(self, text: str) -> int:
        """Tokens of a text."""
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)


async def run_serve_bench(config: Config, peers: Path, size: Size, as_json: bool) -> int:
    """Measure and report; returns the exit status: 1 when a goal was missed."""
    _check(config, size)
    python_of(peers)
    with private_folder("kvtide-bench-serve-") as folder, reporter(console(stderr=as_json)) as progress:
        made = await measure(config, peers, folder, size, progress.say)
    return report("serve", made, as_json)


def _check(config: Config, size: Size) -> None:
    if config.model.path:
        raise StackError(f"model.path is {config.model.path}, but llama.cpp serves the default model: leave it empty")
    least = 4 * size.clients  # a quarter of the contexts is on the device, and those that are asked must be
    if not least <= size.sessions <= MOST_SESSIONS or size.clients < 1:
        raise StackError(f"--sessions {size.sessions} with --clients {size.clients}: give {least} to {MOST_SESSIONS}")
    if size.turns < 2:
        raise StackError(f"--turns {size.turns}: sessions return from the second turn on, give at least 2")


async def measure(config: Config, peers: Path, folder: Path, size: Size, say: Report) -> list[Row]:
    """All rows. peers: made by bench/peers/setup-serve. Raises StackError when an engine fails or says nothing."""
    config = private(await asyncio.to_thread(with_model, config, say), folder)
    threads = config.worker.threads or len(os.sched_getaffinity(0))
    words = await asyncio.to_thread(Words, config)
    room = budget(
        max(words.of_prompt(Chat(number).messages) for number in range(size.sessions)),
        size.sessions,
        size.turns + 1,
        size.memory,
        config.cache.page_size,
        geometry_of(config).token_bytes,
    )
    cache = replace(config.cache, device_tokens=room.device_tokens, host_bytes=room.host_bytes)
    worker = replace(config.worker, threads=threads)
    config = replace(config, cache=cache, worker=worker)
    say(
        f"{size.sessions} sessions of {room.context_tokens} tokens at their end; cache of each engine "
        f"{room.total_bytes / 1e6:,.0f} MB, ours with {room.device_tokens} tokens on the device"
    )
    llama = llama_server(peers, find_source().path, folder / "llama.log", threads, room)
    others = {LLAMA: llama}
    if size.clients == 1:
        others[TRANSFORMERS] = transformers_server(peers, config, folder / "transformers.log", threads, room)
    engines: dict[str, Start] = {OURS: partial(kvtide, config, say)}
    engines |= {name: partial(peer, command, say) for name, command in others.items()}
    runs = await _run(engines, size, words, say)
    conditions = (
        f"{size.sessions} sessions, {size.clients} at a time, caches for {size.memory:g} of their contexts, "
        f"{config.model.dtype}, {threads} threads"
    )
    return rows(runs.pop(OURS), runs, conditions)


async def _run(engines: Mapping[str, Start], size: Size, words: Words, say: Report) -> dict[str, Run]:
    chats = {name: [Chat(number) for number in range(size.sessions)] for name in engines}
    turns: dict[str, list[list[Reply]]] = {name: [] for name in engines}
    memory: dict[str, int] = {}
    for first, last in ((0, size.turns), (size.turns, size.turns + 1)):
        async with AsyncExitStack() as block:
            running = {}
            for name, start in engines.items():
                say(f"starting {name}")
                running[name] = await block.enter_async_context(start())
            for turn in range(first, last):
                for name, engine in running.items():
                    say(f"turn {turn + 1}: {name}")
                    turns[name].append(await _turn(engine, chats[name], turn, size.clients, words))
            for name, engine in running.items():
                memory.setdefault(name, await asyncio.to_thread(proportional_set_size, engine.pids()))
    return {name: Run(turns[name][:-1], turns[name][-1], memory[name]) for name in engines}


async def _turn(engine: Engine, chats: list[Chat], turn: int, clients: int, words: Words) -> list[Reply]:
    """One question of every session, `clients` at a time; the replies as they came."""
    waiting, replies = asyncio.Semaphore(clients), []

    async def ask(chat: Chat) -> None:
        async with waiting:
            reply = await engine.ask(chat.number, chat.messages, MAX_TOKENS)
        prompt_tokens = reply.prompt_tokens or words.of_prompt(chat.messages)
        replies.append(reply._replace(prompt_tokens=prompt_tokens, tokens=reply.tokens or words.of_text(reply.text)))
        chat.go_on(reply.text)

    asking = [asyncio.create_task(ask(chats[number])) for number in order(len(chats), turn)]
    try:
        await asyncio.gather(*asking)
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
    await engine.settle()
    return replies
