"""A gateway with a scheduler that does what a test says, and a model folder without weights."""

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import msgspec
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from services.gateway.server import ADDRESS_FILE, serve
from shared.config import Config, Gateway, Model, Run, Scheduler
from shared.messages import FromGateway
from shared.messages.common import Heartbeat, HelloWanted, Message, Welcome
from shared.messages.gateway import (
    Abort,
    Administer,
    Administered,
    Emission,
    EmitTokens,
    Finish,
    GatewayHello,
    Reject,
    Status,
    StatusWanted,
    Submit,
    Usage,
    Why,
    WhyWanted,
)
from shared.packed import pack, unpack
from shared.transport import Decoder, Router, decode_envelope, encode

CONTEXT = 64
TLS = ssl.create_default_context()  # unused; making one for each client takes 30 ms
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'forbidden' or m.content == 'forbidden' %}"
    "{{ raise_exception('not that') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model(folder: Path, context: int = CONTEXT) -> Path:
    """A byte-level tokenizer in which every byte is a token, and the files around it."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab = {char: n for n, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id("<|im_end|>")
    texts = {
        "config.json": {"max_position_embeddings": context, "vocab_size": 260, "eos_token_id": end},
        "generation_config.json": {"eos_token_id": [end]},
        "tokenizer_config.json": {"chat_template": TEMPLATE, "bos_token": None, "eos_token": "<|im_end|>"},
    }
    for name, content in texts.items():
        (folder / name).write_text(json.dumps(content))
    return folder


class Words:
    """Text <-> tokens of the model that `write_model` wrote."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.end = self.tokenizer.token_to_id("<|im_end|>")

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def text(self, ids: Iterable[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)


async def until(condition: Callable[[], object], timeout_s: float = 10) -> None:
    """Wait until the condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        await asyncio.sleep(0.01)


class FakeScheduler:
    """Takes hellos, notes what gateways say, and answers requests by `answer` or as a test directs it."""

    def __init__(self, endpoint: str, interval_s: float = 1.0) -> None:
        self.epoch = time.time_ns()
        self.interval_s = interval_s
        self.submits: list[Submit] = []
        self.aborts: list[str] = []
        self.hellos = 0
        self.silent = False  # neither hears nor says anything
        self.answer: Callable[[Submit], list[int]] | None = None
        self.pace_s = 0.0  # between two tokens of an answer
        self.finish_aborted = False  # answers Abort with Finish
        self.status: bytes | None = msgspec.json.encode({"ready": True, "peers": [], "counters": {}})
        self.last_wish: Administer | None = None
        self.wishes: list[tuple[str, str]] = []  # Administer: action and storage
        self.refusal = ""  # of Administer
        self.explanations: dict[str, dict] = {}  # by request id
        self._router = Router(endpoint)
        self._decode = Decoder(FromGateway)
        self._peers: dict[str, int] = {}

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._beat())
                while True:
                    peer, frames = await self._router.receive()
                    if not self.silent:
                        self._take(peer, decode_envelope(*frames), self._decode(frames[1]), tasks)
        finally:
            self._router.close()

    def send(self, message: Message) -> None:
        for peer, epoch in self._peers.items():
            self._router.send(peer, encode(self.epoch, epoch, message))

    def forget_gateways(self) -> None:
        """As after three missed heartbeats."""
        self._peers.clear()

    def emit(self, submit: Submit, tokens: list[int], top: dict[int, float] | None = None, logprob: float = -0.5):
        floats = np.array([logprob] * len(tokens), dtype="<f4").tobytes()
        ids = [pack(top)] * len(tokens) if top else []
        values = [np.array(list(top.values()), dtype="<f4").tobytes()] * len(tokens) if top else []
        self.send(EmitTokens([Emission(submit.request_id, pack(tokens), floats, ids, values)]))

    def finish(self, submit: Submit, count: int, reason: str = "stop", hits: tuple[int, int, int] = (0, 0, 0)) -> None:
        usage = Usage(len(unpack(submit.tokens)), count, *hits, retracted=1, queue_s=0.25)
        self.send(Finish(submit.request_id, reason, usage))

    def reject(self, submit: Submit, code: int, message: str, retry: bool) -> None:
        self.send(Reject(submit.request_id, code, message, retry))

    async def submitted(self, count: int = 1) -> Submit:
        """The count-th request."""
        await until(lambda: len(self.submits) >= count)
        return self.submits[count - 1]

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self.interval_s / 2)
            if not self.silent:
                self.send(Heartbeat(self.interval_s, {}))

    def _take(self, peer: str, envelope, message, tasks: asyncio.TaskGroup) -> None:
        if isinstance(message, GatewayHello):
            self.hellos += 1
            self._peers[peer] = envelope.sender_epoch
            for message in (Welcome("scheduler-0"), Heartbeat(self.interval_s, {})):
                self._router.send(peer, encode(self.epoch, envelope.sender_epoch, message))
        elif self._peers.get(peer) != envelope.sender_epoch or envelope.receiver_epoch != self.epoch:
            self._router.send(peer, encode(self.epoch, envelope.sender_epoch, HelloWanted()))
        elif isinstance(message, Submit):
            self.submits.append(message)
            if self.answer is not None:
                tasks.create_task(self._play(message, self.answer(message)))
        elif isinstance(message, Abort):
            self.aborts.append(message.request_id)
            submit = next((s for s in self.submits if s.request_id == message.request_id), None)
            if self.finish_aborted and submit is not None:
                self.finish(submit, 0, "abort", (4, 2, 1))
        elif isinstance(message, WhyWanted):
            known = [self.explanations[each] for each in message.request_ids if each in self.explanations]
            self.send(Why(message.question, msgspec.json.encode(known)))
        elif isinstance(message, Administer):
            self.wishes.append((message.action, message.storage))
            self.last_wish = message
            self.send(Administered(message.question, self.refusal, {"pages": 3}))
        elif isinstance(message, StatusWanted) and self.status is not None:
            self.send(Status(self.status))

    async def _play(self, submit: Submit, tokens: list[int]) -> None:
        sent = tokens[: submit.max_tokens or None]
        for token in sent:
            if submit.request_id in self.aborts:
                return
            self.emit(submit, [token])
            await asyncio.sleep(self.pace_s)
        stopped = bool(sent) and sent[-1] in submit.stop_token_ids
        self.finish(submit, len(sent), "stop" if stopped else "length")


class Stack:
    """The gateway under test and its surroundings."""

    def __init__(self, config: Config, words: Words) -> None:
        self.config = config
        self.words = words
        self.stop = asyncio.Event()
        self.url = ""
        self.scheduler: FakeScheduler
        self._running: dict[FakeScheduler, asyncio.Task[None]] = {}

    async def start_scheduler(self, **options: float) -> FakeScheduler:
        self.scheduler = FakeScheduler(self.config.scheduler_endpoint, **options)
        self._running[self.scheduler] = asyncio.create_task(self.scheduler.run())
        return self.scheduler

    async def stop_scheduler(self) -> None:
        task = self._running.pop(self.scheduler)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def client(self, **options: object) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=30, trust_env=False, verify=TLS, **options)

    async def post(self, path: str, body: object, **options: object) -> httpx.Response:
        async with self.client() as client:
            return await client.post(path, json=body, **options)

    async def complete(self, **body: object) -> httpx.Response:
        return await self.post("/v1/completions", {"model": "tiny", "prompt": "hello", **body})

    async def chat(self, text: str = "hello", **body: object) -> httpx.Response:
        messages = [{"role": "user", "content": text}]
        return await self.post("/v1/chat/completions", {"model": "tiny", "messages": messages, **body})

    def says(self, text: str, end: bool = True) -> None:
        """Every request is answered with this text."""
        ids = self.words.ids(text) + ([self.words.end] if end else [])
        self.scheduler.answer = lambda submit: ids


@asynccontextmanager
async def run_stack(
    run_folder: Path,
    model: Path,
    *,
    scheduler: bool = True,
    keys: tuple[str, ...] = (),
    admin_keys: tuple[str, ...] = (),
    timeout_s: float = 600,
    **model_options,
) -> AsyncIterator[Stack]:
    """Gateway, and scheduler if wanted, until the end of the block; then nothing may be open."""
    config = Config(
        run=Run(folder=str(run_folder)),
        model=Model(path=str(model), name="tiny", **model_options),
        scheduler=Scheduler(request_timeout_s=timeout_s),
        gateway=Gateway(port=0, api_keys=keys, admin_keys=admin_keys),
    )
    stack = Stack(config, Words(model))
    if scheduler:
        await stack.start_scheduler()
    serving = asyncio.create_task(serve(config, "gateway-0", stack.stop))
    try:
        address = run_folder / ADDRESS_FILE
        await until(lambda: address.exists() or serving.done())
        if not serving.done():
            stack.url = json.loads(address.read_bytes())["url"]
            if scheduler:
                await until(lambda: stack.scheduler.hellos)
        yield stack
    finally:
        stack.stop.set()
        await asyncio.wait_for(serving, 20)
        assert not address.exists()
        for task in stack._running.values():
            task.cancel()
        await asyncio.gather(*stack._running.values(), return_exceptions=True)


def events(text: str) -> list[dict]:
    """The JSON events of a stream that ended well."""
    assert text.endswith("data: [DONE]\n\n")
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
