"""Operations in flight: who still has to answer, what they hold, when they are sent again.

An operation *fails* (its purpose is given up) at once when a peer is lost or stays silent; it *settles* (what it
holds is free again) only when every process that got the command has acked, fenced or exited. Between the two it is
in doubt, and its pages are quarantined (docs/architecture.md: Failing and settling).
"""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from services.scheduler.core.events import PeerKey, Send
from services.scheduler.core.ghosts import NO_FATE, Fate
from services.scheduler.core.pages import NO_PAGES, HostPool, Pages
from services.scheduler.core.settings import ASK_AGAIN_S, MAX_HURRIES, MAX_SENDS, STEP_TIMEOUT_S, TRANSFER_TIMEOUT_S
from shared.messages.common import Cancel, Message

if TYPE_CHECKING:
    from services.scheduler.core.events import BlockStored
    from services.scheduler.core.request import Request
    from services.scheduler.core.tree_holds import Lock
    from shared.messages.worker import Sampled


class Operation:
    """One command to one or more processes.

    Thousands begin in a second: they aren't dataclasses, whose `__init__` mypyc leaves to the interpreter.
    """

    op_id: int = 0
    message: Message | None = None
    failed: bool = False  # given up, not yet settled
    cancelled: bool = False
    sends: int = 0
    hurries: int = 0  # sends that didn't count
    deadline: float = 0.0
    timeout_s: float = TRANSFER_TIMEOUT_S

    def __init__(self, pool: HostPool | None = None, host_pages: Pages = NO_PAGES, lock: "Lock | None" = None) -> None:
        self.pool = pool  # whose pages it names
        self.host_pages = host_pages
        self.lock = lock
        self.waiting: set[PeerKey] = set()  # processes that may still act on it

    @property
    def held_host_pages(self) -> Pages:
        """Host pages that are in no node while the operation lasts."""
        return NO_PAGES

    @property
    def pinned_host_pages(self) -> Pages:
        """Host pages of nodes that the operation reads."""
        return NO_PAGES


class HoldsHostPages(Operation):
    """The pages are in no node."""

    @property
    def held_host_pages(self) -> Pages:
        return self.host_pages


class PinsHostPages(Operation):
    """The pages are a node's."""

    @property
    def pinned_host_pages(self) -> Pages:
        return self.host_pages


class Write(HoldsHostPages):
    """write_backup: WritePages, then CommitPages with the checksums of all ranks."""

    committing: bool = False
    evicts: bool = False  # write_back: the device pages go at Committed
    fate: Fate = NO_FATE  # what they go for
    clock: int = 0  # the tree's at its start

    def __init__(self, pool: HostPool | None = None, host_pages: Pages = NO_PAGES, lock: "Lock | None" = None) -> None:
        super().__init__(pool, host_pages, lock)
        self.checksums: dict[int, bytes] = {}  # by rank


class Load(PinsHostPages):
    """load_back: the nodes under `lock` have their device pages, being filled."""

    bad_from: int = -1  # first page position that failed; -1 = none

    def __init__(self, pool: HostPool | None = None, host_pages: Pages = NO_PAGES, lock: "Lock | None" = None) -> None:
        super().__init__(pool, host_pages, lock)
        self.requests: set[Request] = set()  # that wait for it


class Release(HoldsHostPages):
    """ReleasePages: the ids are free at Released."""


class Find(Operation):
    """FindPages for one request; others with the same next page wait for it."""

    def __init__(
        self,
        seed: bytes,
        tokens: bytes,
        first: int,
        digests: list[bytes],
        requests: "list[Request]",
        lock: "Lock | None" = None,
    ) -> None:
        super().__init__(lock=lock)
        self.seed = seed  # namespace
        self.tokens = tokens  # that the digests were made of, from the first page of the sequence on
        self.first = first  # page index of the first digest
        self.digests = digests
        self.requests = requests
        self.hits: dict[PeerKey, int] = {}  # leading pages that each storage's L3 has


class Prefetch(HoldsHostPages):
    """PrefetchPages: L3 -> host pages, which join the tree under `lock`."""

    taken: int = 0  # leading pages that joined the tree
    named: int = 0  # leading pages that storage has named so far

    def __init__(
        self,
        pool: HostPool,
        host_pages: Pages,
        lock: "Lock | None",
        seed: bytes,
        tokens: bytes,
        first: int,
        digests: list[bytes],
        requests: "list[Request]",
    ) -> None:
        super().__init__(pool, host_pages, lock)
        self.seed = seed
        self.tokens = tokens
        self.first = first  # page index of host_pages[0]
        self.digests = digests
        self.requests = requests

    @property
    def held_host_pages(self) -> Pages:
        return self.host_pages[self.taken :]


class Adopt(Prefetch):
    """AdoptPages: an earlier scheduler's host pages join the tree as prefetched ones do."""


class Archive(PinsHostPages):
    """ArchivePages: host pages -> L3."""

    def __init__(self, pool: HostPool | None = None, host_pages: Pages = NO_PAGES) -> None:
        super().__init__(pool, host_pages)
        self.digests: list[bytes] = []
        self.dropped: set[bytes] = set()  # of them, what L3 has lost since: the answer may be from before
        self.blocks: list[BlockStored] = []  # for KV events


class Held(NamedTuple):
    """What a request had whose step is in doubt."""

    request: "Request"
    attempt: int
    pages: Pages  # its own
    lock: "Lock | None"


class Step(Operation):
    """RunStep. In doubt it holds what its requests had: their own pages and their locks."""

    error: str = ""  # of a rank that failed
    waits: bool = False  # for loads
    timeout_s: float = STEP_TIMEOUT_S

    def __init__(self) -> None:
        super().__init__()
        self.held: list[Held] = []
        self.requests: list[tuple[Request, int, int, bool]] = []  # (.., attempt, tokens, samples)
        self.results: list[Sampled] = []  # of the first rank

    @property
    def device_pages(self) -> list[Pages]:
        """Of what it holds."""
        return [each.pages for each in self.held]

    @property
    def locks(self) -> "list[Lock]":
        """The same."""
        return [each.lock for each in self.held if each.lock is not None]

    def names(self, request: "Request", attempt: int) -> bool:
        """Does it compute tokens of this attempt?"""
        return any(each is request and number == attempt for each, number, _, _ in self.requests)


class Control(Operation):
    """Fence, OpenSegment, MapSegment, DropSegment: no page of its own."""

    def __init__(self, on_done: Callable[[Any], None]) -> None:
        super().__init__()
        self.on_done = on_done


def _is_free(operation: Operation) -> bool:
    """It takes no credit: such operations are few at a time, and a step must not overtake its loads."""
    return isinstance(operation, (Control, Step, Load))


class Operations:
    """The table of operations, their credits and their deadlines."""

    def __init__(self, send: Callable[[Send], None], on_failed: Callable[[Operation], None]) -> None:
        self.table: dict[int, Operation] = {}
        self.steps = 0  # of them
        self.now = 0.0
        self._send = send
        self._on_failed = on_failed
        self._next_id = 1
        self._credits: dict[PeerKey, int] = {}
        self._held: dict[PeerKey, int] = {}  # processes that have not acked their Fence: its op_id
        self._silent: set[PeerKey] = set()  # lost ones: they have no use for messages
        self._backlog: dict[PeerKey, deque[tuple[Operation, Message]]] = {}

    def new_id(self) -> int:
        """The next op_id of this epoch."""
        op_id, self._next_id = self._next_id, self._next_id + 1
        return op_id

    def hold(self, peer: PeerKey, fence_id: int) -> None:
        """A Fence is on its way: no earlier command may follow it, neither for the first time nor again."""
        self._silent.discard(peer)
        self._held[peer] = fence_id

    def grant(self, peer: PeerKey, credits: int) -> None:
        """A process has fenced; from now on it takes so many operations at once."""
        self._held.pop(peer, None)
        self._credits[peer] = credits
        self._send_backlog(peer)

    def lost(self, peer: PeerKey) -> None:
        """Nothing more is sent to the process until it says hello again."""
        self._silent.add(peer)

    def is_lost(self, peer: PeerKey) -> bool:
        """Has the process been lost, and not said hello since?"""
        return peer in self._silent

    def start(self, operation: Operation, message: Message, peers: list[PeerKey]) -> None:
        """Send a command whose op_id is `new_id()`'s; an operation may be started again with its next command."""
        operation.op_id = message.op_id  # type: ignore[attr-defined]
        operation.message = message
        operation.waiting = set(peers)
        operation.sends, operation.hurries = 1, 0
        operation.deadline = self.now + operation.timeout_s
        self.table[operation.op_id] = operation
        self.steps += isinstance(operation, Step)
        for peer in peers:
            self._spend(peer, operation, message)

    def answered(self, op_id: int, peer: PeerKey) -> Operation | None:
        """An ack, failure or Cancelled has come. Returns the operation if this peer owed an answer."""
        operation = self.table.get(op_id)
        if operation is None or peer not in operation.waiting:
            return None
        operation.waiting.discard(peer)
        self._earn(peer, operation)
        if not operation.waiting:
            del self.table[op_id]
            self.steps -= isinstance(operation, Step)
        return operation

    def fail(self, operation: Operation) -> None:
        """Give an operation up; it stays in doubt until it settles. Calls `on_failed` once."""
        if not operation.failed:
            operation.failed = True
            operation.deadline = self.now + operation.timeout_s
            self._on_failed(operation)

    def withdraw(self, operation: Operation) -> bool:
        """Take a failed operation back from peers that it was never sent to. True when nobody else has it."""
        for peer in [peer for peer in sorted(operation.waiting) if self._is_queued(peer, operation)]:
            self.answered(operation.op_id, peer)
        return not operation.waiting

    def cancel(self, operation: Operation) -> None:
        """Ask the peers to drop it; its own ack or Cancelled still comes."""
        if not operation.cancelled:
            self._send_cancel(operation)

    def _send_cancel(self, operation: Operation) -> None:
        operation.cancelled = True
        for peer in sorted(operation.waiting - self._silent):
            if not self._is_queued(peer, operation):
                self._send(Send(peer, Cancel(self.new_id(), operation.op_id)))

    def gone(self, peer: PeerKey, *, below: int | None = None, segment_epoch: int | None = None) -> list[Operation]:
        """The process touches no page any more: it has ended, or has fenced (operations before `below`), or maps a
        segment no more (operations on its pages).

        Returns the operations that have settled by it; each has failed before.
        """
        settled = []
        for operation in list(self.table.values()):
            if peer not in operation.waiting or (below is not None and operation.op_id >= below):
                continue
            pool = operation.pool
            if segment_epoch is not None and (pool is None or pool.segment_epoch != segment_epoch):
                continue
            self.fail(operation)
            if self.answered(operation.op_id, peer) and not operation.waiting:
                settled.append(operation)
        if below is None and segment_epoch is None:
            self._credits.pop(peer, None)
            self._backlog.pop(peer, None)
            self._silent.discard(peer)
            self._held.pop(peer, None)
        return settled

    def of_peer(self, peer: PeerKey) -> list[Operation]:
        """Operations that the process has not answered."""
        return [operation for operation in self.table.values() if peer in operation.waiting]

    def live(self, kind: type[Operation]) -> list[Any]:
        """Operations of a kind that have not been given up."""
        return [operation for operation in self.table.values() if isinstance(operation, kind) and not operation.failed]

    def hurry(self, peer: PeerKey) -> None:
        """Messages to or from the process were lost: ask soon again for all that it owes. It isn't what was too late,
        so this isn't one of the MAX_SENDS, at most MAX_HURRIES times."""
        for operation in self.of_peer(peer):
            if operation.hurries >= MAX_HURRIES:
                continue
            if self.now + ASK_AGAIN_S < operation.deadline < float("inf") and not self._is_queued(peer, operation):
                operation.deadline = self.now + ASK_AGAIN_S
                operation.sends -= 1
                operation.hurries += 1

    def next_deadline(self) -> float:
        """When the next silent peer is asked again."""
        first = float("inf")
        for operation in self.table.values():
            first = min(first, operation.deadline)
        return first

    def expire(self) -> None:
        """Send late commands again, a bounded number of times, then give them up; from then on ask to drop them."""
        for operation in list(self.table.values()):
            if operation.deadline > self.now:
                continue
            operation.sends += 1
            if operation.sends > MAX_SENDS:
                self.fail(operation)
            operation.deadline = self.now + operation.timeout_s
            if operation.cancelled or operation.failed:
                self._send_cancel(operation)
                if operation.waiting <= self._silent:
                    operation.deadline = float("inf")  # until they fence or exit
                continue
            for peer in sorted(operation.waiting):
                overtaken = operation.op_id < self._held.get(peer, 0)
                if operation.message is not None and not overtaken and not self._is_queued(peer, operation):
                    self._send(Send(peer, operation.message))

    def _is_queued(self, peer: PeerKey, operation: Operation) -> bool:
        return any(waiting is operation for waiting, _ in self._backlog.get(peer, ()))

    def _spend(self, peer: PeerKey, operation: Operation, message: Message) -> None:
        if _is_free(operation) or (peer not in self._held and self._credits.get(peer, 0) > 0):
            if not _is_free(operation):
                self._credits[peer] -= 1
            self._send(Send(peer, message))
        else:
            self._backlog.setdefault(peer, deque()).append((operation, message))

    def _earn(self, peer: PeerKey, operation: Operation) -> None:
        if _is_free(operation) or peer not in self._credits:
            return
        backlog = self._backlog.get(peer)
        if backlog:
            for position, (waiting, _) in enumerate(backlog):
                if waiting is operation:
                    del backlog[position]  # it never left; its credit was never spent
                    return
        self._credits[peer] += 1
        if peer not in self._held:
            self._send_backlog(peer)

    def _send_backlog(self, peer: PeerKey) -> None:
        backlog = self._backlog.get(peer)
        while backlog and self._credits[peer] > 0:
            waiting, message = backlog.popleft()
            self._credits[peer] -= 1
            waiting.deadline = self.now + waiting.timeout_s
            self._send(Send(peer, message))
