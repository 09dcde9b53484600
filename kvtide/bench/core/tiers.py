"""Our side of the tiered rows: a whole core, with a worker and a storage around it that answer each command at once.

All goes through `Core.handle`, as in the scheduler's process, but no message is encoded. Whether the bytes of pages are
moved, the caller says.
"""

import gc
import time
from collections import deque
from typing import NamedTuple

import numpy as np

from kvtide.bench.core.page_bytes import PageBytes, geometry
from kvtide.bench.core.trees import pack
from kvtide.bench.core.workloads import Prompt
from services.scheduler.core.core import Core
from services.scheduler.core.events import Event, PeerKey, PeerUp, Received
from services.scheduler.core.integrity import check_integrity
from services.scheduler.core.settings import CoreSettings, WritePolicy
from shared.errors import IntegrityError
from shared.messages.common import Fence, Fenced, Message, Welcome
from shared.messages.gateway import EmitTokens, Finish, GatewayHello, Namespace, Reject, Submit
from shared.messages.storage import (
    BackendInfo,
    CommitPages,
    Committed,
    OpenSegment,
    Released,
    ReleasePages,
    SegmentInfo,
    SegmentOpened,
    StorageHello,
)
from shared.messages.worker import (
    LoadDone,
    LoadPages,
    MapSegment,
    RunStep,
    Sampled,
    Sampling,
    SegmentMapped,
    StepDone,
    WorkerHello,
    WriteDone,
    WritePages,
)
from shared.page_hash import chain

GATEWAY, WORKER, STORAGE = PeerKey("gateway", 1), PeerKey("worker", 1), PeerKey("storage", 1)
MODEL = bytes(32)
NO_L3 = BackendInfo("none", "none", False, False, 0)
GREEDY = Sampling(0.0, 1.0, 0, 0.0, 0, 0, 0)
CREDITS = 1_000  # no command waits for one
TIMEOUT_S = 600.0
TOOK_S = 1e-3  # what steps and copies say of themselves
TOKEN = 1


class Tiered(NamedTuple):
    """What came of a workload."""

    seconds: float
    device_hits: int  # tokens
    host_hits: int  # tokens

    def hits(self, tokens: int) -> str:
        """In words: shares of all `tokens` of the prompts."""
        return f"device {self.device_hits / tokens:.0%}, host {self.host_hits / tokens:.0%}"


class TieredCore:
    """A core with device and host pages. Explanations are off: the peer has none."""

    def __init__(
        self, policy: WritePolicy, page_size: int, device_tokens: int, host_tokens: int, moves: bool = False
    ) -> None:
        """moves: there is memory behind the pages, and copies between the tiers happen."""
        device, host = device_tokens // page_size, host_tokens // page_size
        shape = geometry(page_size)
        settings = CoreSettings(page_size=page_size, write_policy=policy, explain=False, token_budget=device_tokens)
        self.core = Core(settings)
        self.bytes = PageBytes(page_size, device + 1, host + 1) if moves else None
        self._segment = SegmentInfo("storage", "", 1, host + 1, 1, host, shape, MODEL)
        self._page_checksums = bytes(4 * shape.units)
        self._requests = self._finished = 0
        self._deliver(PeerUp(GATEWAY, GatewayHello("gateway")))
        self._deliver(
            PeerUp(WORKER, WorkerHello("worker", 0, shape, MODEL, device + 1, 1, device_tokens, 1, CREDITS, []))
        )
        self._deliver(PeerUp(STORAGE, StorageHello("storage", NO_L3, None, [], 0, CREDITS)))

    def serve(self, prompt: Prompt) -> None:
        """Submit, the prompt's step, its one token, Finish, and the copies that follow from it."""
        self._requests += 1
        name = str(self._requests)
        submit = Submit(name, pack(prompt), 1, [], GREEDY, Namespace(), 0, TIMEOUT_S)
        self._deliver(Received(GATEWAY, submit))
        if self._finished != self._requests:
            raise IntegrityError(f"request {name} of {len(prompt)} tokens waits for something that never comes")

    @property
    def device_hits(self) -> int:
        """Tokens of all prompts so far that device pages had."""
        return self.core.state.counters["device_hit_tokens"]

    @property
    def host_hits(self) -> int:
        """Tokens of all prompts so far that were loaded back from host pages."""
        return self.core.state.counters["host_hit_tokens"]

    def _deliver(self, event: Event) -> None:
        """An event and all that it causes."""
        events = deque([event])
        while events:
            for send in self.core.handle(events.popleft(), time.monotonic()):
                answer = self._answer(send.message)
                if answer is not None:
                    events.append(Received(send.peer, answer))

    def _answer(self, command: Message) -> Message | None:
        match command:
            case RunStep(op_id, items):
                sampled = [Sampled(item.row, TOKEN, 0.0, b"", b"") for item in items if item.sampling is not None]
                return StepDone(op_id, 0, sampled, TOOK_S)
            case WritePages(op_id):
                if self.bytes is not None:
                    return WriteDone(op_id, 0, self.bytes.write(command), TOOK_S)
                return WriteDone(op_id, 0, self._page_checksums * (len(command.host_pages) // 4), TOOK_S)
            case LoadPages(op_id):
                if self.bytes is not None:
                    self.bytes.load(command)
                return LoadDone(op_id, 0, TOOK_S)
            case CommitPages(op_id):
                if self.bytes is not None:
                    self.bytes.commit(command)
                return Committed(op_id)
            case ReleasePages(op_id):
                if self.bytes is not None:
                    self.bytes.release(command)
                return Released(op_id)
            case Fence(op_id):
                return Fenced(op_id, 0)
            case OpenSegment(op_id):
                return SegmentOpened(op_id, self._segment)
            case MapSegment(op_id):
                return SegmentMapped(op_id, 0)
            case Finish():
                self._finished += 1
                return None
            case EmitTokens() | Welcome():
                return None
            case Reject():
                raise IntegrityError(f"request {command.request_id} was refused: {command.message}")
        raise IntegrityError(f"nobody answers a {type(command).__name__}")


class _CheckedCore(TieredCore):
    """Its forward pass gives each page bytes that follow from the tokens up to the page's end."""

    _keys: list[bytes]  # of the prompt's pages

    def serve(self, prompt: Prompt) -> None:
        """See TieredCore. Raises IntegrityError when a page of the prompt has other bytes than were computed."""
        assert self.bytes is not None
        tree = self.core.state.tree
        self._keys = list(chain(b"", pack(prompt), tree.page_size))
        super().serve(prompt)
        match = tree.match_prefix(b"", pack(prompt), len(self._keys))
        pages = [int(page) for node in match.device if node.value is not None for page in node.value]
        for page, key in zip(pages, self._keys, strict=True):
            if self.bytes.content(page) != self._computed(key):
                raise IntegrityError(f"device page {page} has other bytes than were computed for its tokens")

    def _answer(self, command: Message) -> Message | None:
        if isinstance(command, RunStep) and self.bytes is not None:
            for item in command.items:
                first = item.start // self.core.state.settings.page_size
                pages = np.frombuffer(item.pages, "<i4")[first - item.first_page :]
                for page, key in zip(pages, self._keys[first:], strict=False):  # the last is for the token to come
                    self.bytes.fill(int(page), self._computed(key))
        return super()._answer(command)

    def _computed(self, key: bytes) -> bytes:
        shape = self._segment.geometry
        return np.random.default_rng(list(key)).bytes(shape.page_bytes)


def check_bytes(
    prompts: list[Prompt], policy: WritePolicy, page_size: int, device_tokens: int, host_tokens: int
) -> None:
    """Serve prompts, and compare each of their pages, computed now or before, loaded or not, with what was computed.
    Raises IntegrityError for a page with other bytes, and when nothing was loaded."""
    user = _CheckedCore(policy, page_size, device_tokens, host_tokens, moves=True)
    for prompt in prompts:
        user.serve(prompt)
    _check_used(user, policy)


def tiered_requests(
    prompts: list[Prompt],
    policy: WritePolicy,
    page_size: int,
    device_tokens: int,
    host_tokens: int,
    moves: bool = False,
) -> Tiered:
    """All prompts, one after the other. Raises IntegrityError when the host pages were of no use."""
    user = TieredCore(policy, page_size, device_tokens, host_tokens, moves)
    gc.collect()
    gc.disable()
    started = time.perf_counter()
    for prompt in prompts:
        user.serve(prompt)
    seconds = time.perf_counter() - started
    gc.enable()
    check_integrity(user.core)
    _check_used(user, policy)
    return Tiered(seconds, user.device_hits, user.host_hits)


def _check_used(user: TieredCore, policy: WritePolicy) -> None:
    if not user.host_hits:
        raise IntegrityError(f"{policy}: no prompt was found in host pages, so that this measures one tier")
