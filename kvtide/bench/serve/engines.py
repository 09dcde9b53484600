"""The three engines as `kvtide bench serve` sees them: an HTTP server each, started and stopped with a block."""

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import httpx
import msgspec

from kvtide.bench.serve.plan import Budget, Messages
from kvtide.bench.step import READY_TIMEOUT_S
from kvtide.chat_client import DATA, DONE, RequestError, chat, client
from kvtide.child import Command, Report, StackError, last_lines
from kvtide.stack import running_stack
from kvtide.supervisor import Supervisor
from shared.config import Config

PEERS = Path(__file__).parents[3] / "bench" / "peers"
LOOPBACK = "127.0.0.1"
IDLE_TIMEOUT_S = 60.0  # the last pages reach their files within seconds
POLL_S = 0.2


class Reply(NamedTuple):
    """One answered turn, as the client saw it."""

    text: str
    prompt_tokens: int  # 0 = the engine doesn't say
    tokens: int  # of the answer; 0 = the engine doesn't say
    ttft_s: float  # from sending the request to the first piece of the answer
    decode_s: float  # from the first piece to the last
    device_tokens: int = 0  # of the prompt, by tier; ours only
    host_tokens: int = 0
    storage_tokens: int = 0


class Engine(NamedTuple):
    """A running engine."""

    ask: Callable[[int, Messages, int], Awaitable[Reply]]  # session, what was said, most tokens of the answer
    settle: Callable[[], Awaitable[None]]  # until nothing works in the background; StackError if something is wrong
    pids: Callable[[], list[int]]


@asynccontextmanager
async def kvtide(config: Config, say: Report) -> AsyncIterator[Engine]:
    """Our stack. Page files stay in `storage.folder`."""
    async with running_stack(config, report=say) as stack:
        await stack.wait_ready(READY_TIMEOUT_S)
        async with client(stack.url) as http:

            async def ask(session: int, messages: Messages, max_tokens: int) -> Reply:
                begun = time.perf_counter()
                answer = await chat(http, config.model.name, messages, max_tokens=max_tokens)
                decode_s = time.perf_counter() - begun - answer.ttft_s
                hits = answer.device_tokens, answer.host_tokens, answer.storage_tokens
                counts = answer.prompt_tokens, len(answer.tokens)
                return Reply(answer.text, *counts, answer.ttft_s, decode_s, *hits)

            async def settle() -> None:
                status = await stack.wait_idle(IDLE_TIMEOUT_S)
                if status["integrity"] != "ok":
                    raise StackError(f"integrity: {status['integrity']}")

            yield Engine(ask, settle, lambda: list(stack.pids.values()))


def python_of(peers: Path) -> Path:
    """The peers' interpreter. Raises StackError where bench/peers/setup-serve hasn't made one."""
    python = peers / "venv" / "bin" / "python"
    if not python.exists():
        raise StackError(f"{peers} has no peers; run: bench/peers/setup-serve {peers}")
    return python


def llama_server(peers: Path, gguf: Path, log: Path, threads: int, room: Budget) -> Command:
    """llama-cpp-python's server with its cache of states in memory."""
    options = {
        "model": gguf,
        "n_ctx": room.context_tokens,
        "n_threads": threads,
        "n_threads_batch": threads,
        "cache": "true",
        "cache_size": room.total_bytes,
        # By default each cached state also has a float32 for each token of the context and of the vocabulary: 300 MB.
        "logits_all": "false",
        "interrupt_requests": "false",  # by default a new request ends the one that runs
        "verbose": "false",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return _command(peers, "llama-server", log, ("llama_cpp.server", *words))


def transformers_server(peers: Path, config: Config, log: Path, threads: int, room: Budget) -> Command:
    """transformers' generate behind HTTP, a cache for each session."""
    numbers = ("--threads", str(threads), "--cache-bytes", str(room.total_bytes))
    model = ("--model", config.model.path, "--dtype", config.model.dtype)
    return _command(peers, "transformers-server", log, ("transformers_server", *model, *numbers))


def _command(peers: Path, name: str, log: Path, arguments: tuple[str, ...]) -> Command:
    # A thread that waits for others spins first, which is fastest as long as nobody else needs the core: not for long.
    environment = {**os.environ, "GOMP_SPINCOUNT": "20000", "PYTHONUNBUFFERED": "1"}
    return Command(name, (str(python_of(peers)), str(PEERS / "with_parent.py"), *arguments), PEERS, log, environment)


@asynccontextmanager
async def peer(command: Command, say: Report) -> AsyncIterator[Engine]:
    """A peer's server, which takes --host and --port. Raises StackError when it isn't ready in time."""
    port = _free_port()
    command = replace(command, argv=(*command.argv, "--host", LOOPBACK, "--port", str(port)))
    async with Supervisor([command], [command.identity], say, lambda pids: None) as supervisor:
        async with client(f"http://{LOOPBACK}:{port}") as http:
            await _ready(http, supervisor, command)

            async def ask(session: int, messages: Messages, max_tokens: int) -> Reply:
                body = {"messages": messages, "max_tokens": max_tokens, "temperature": 0, "user": f"session-{session}"}
                try:
                    return await stream_chat(http, body)
                except RequestError as error:
                    raise StackError(f"{command.identity}: {error}; {_log_end(command)}") from None

            yield Engine(ask, _settled, lambda: list(supervisor.pids.values()))


async def stream_chat(http: httpx.AsyncClient, body: dict[str, object]) -> Reply:
    """One streamed answer of any server with OpenAI's API. Raises RequestError when it fails or brings no text."""
    text, arrivals = "", list[float]()
    usage: dict[str, int] = {}
    begun = time.perf_counter()
    try:
        async with http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
            if response.status_code != httpx.codes.OK:
                message = (await response.aread())[:200].decode("utf-8", "replace")
                raise RequestError(response.status_code, message, retryable=False)
            async for line in response.aiter_lines():
                if line.startswith(DATA) and line != DONE:
                    chunk = msgspec.json.decode(line.removeprefix(DATA))
                    usage = chunk.get("usage") or usage
                    piece = "".join(choice["delta"].get("content") or "" for choice in chunk.get("choices", ()))
                    if piece:
                        text += piece
                        arrivals.append(time.perf_counter())
    except httpx.TransportError as error:
        raise RequestError(0, repr(error), retryable=False) from None
    if not arrivals:
        raise RequestError(0, "the answer has no text", retryable=False)
    counts = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
    return Reply(text, *counts, arrivals[0] - begun, arrivals[-1] - arrivals[0])


async def _settled() -> None:
    """A peer has nothing that works in the background."""


async def _ready(http: httpx.AsyncClient, supervisor: Supervisor, command: Command) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    watch = asyncio.create_task(supervisor.watch())
    try:
        while not await _answers(http):
            if time.monotonic() > deadline:
                late = f"{command.identity} isn't ready after {READY_TIMEOUT_S:g} s"
                raise StackError(f"{late}; {_log_end(command)}")
            await asyncio.wait([watch], timeout=POLL_S)
            if watch.done():
                watch.result()
    finally:
        watch.cancel()


async def _answers(http: httpx.AsyncClient) -> bool:
    try:
        return (await http.get("/v1/models")).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def _log_end(command: Command) -> str:
    return f"its log ends with: {' | '.join(last_lines(command.log))}"


def _free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as listener:
        return int(listener.getsockname()[1])
