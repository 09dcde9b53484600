"""A core with scripted peers: a test says what each of them answers, and when. The invariants are checked after every
event. One gateway, one worker, one storage; pages of two tokens."""

from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec

from kvtide.simulation.segment import geometry
from services.scheduler.core.core import Core
from services.scheduler.core.events import DeadlineReached, Event, PeerKey, PeerLost, PeerUp, Received
from services.scheduler.core.integrity import check_integrity
from services.scheduler.core.node import Node
from services.scheduler.core.pages import HostPool
from services.scheduler.core.settings import CoreSettings
from services.scheduler.core.tree import Match
from shared.messages import common, gateway, storage, worker
from shared.packed import pack, unpack
from shared.page_hash import namespace_seed

MODEL = b"m" * 32
GREEDY = worker.Sampling(0.0, 1.0, 0, 0.0, 0, 0, 0)
DEFAULT = gateway.Namespace()
STEP_S = 1.0
SEGMENT = 50  # epoch of the storage's first segment

M = TypeVar("M", bound=common.Message)


class Harness:
    """`device` and `host` are pages that can be used; host=0 means no storage. A step takes a second."""

    def __init__(
        self, *, device: int = 12, host: int = 24, backend: bool = True, max_steps: int = 1, rows: int = 8,
        context: int = 64, credits: int = 32, page_size: int = 2, ranks: int = 1,
        holders: Iterable[storage.Holder] = (), load_s: float = 0.0, fetch_s: float = 0.0, **settings: Any,
    ) -> None:  # fmt: skip
        self.page_size = page_size
        geometries = [geometry(page_size, rank, ranks) for rank in range(ranks)]
        defaults = {
            "page_size": page_size,
            "load_back_threshold": 1,
            "prefetch_threshold": 4,
            "host_tier": host > 0,
            "tp_size": ranks,
        }
        self.load_s, self.fetch_s = load_s, fetch_s
        self.core = Core(CoreSettings(**(defaults | settings)))
        self.now = 0.0
        self.sent: list[Any] = []  # messages that the test has not answered
        self._receivers: list[tuple[Any, PeerKey]] = []  # of what was sent
        self.emitted: list[tuple[str, int]] = []
        self.ended: dict[str, Any] = {}  # request id -> Finish or Reject
        self.gateway, self.worker, self.storage = (
            PeerKey("gateway-0", 1),
            PeerKey("worker-0", 2),
            PeerKey("storage-0", 3),
        )
        self.worker_hello = worker.WorkerHello(
            "worker-0", 0, geometries[0], MODEL, device + 1, rows, context, max_steps, credits, [SEGMENT]
        )
        kind = "memory" if backend else "none"
        self.storage_hello = storage.StorageHello(
            "storage-0", storage.BackendInfo("l3", kind, False, True, 0), None, list(holders), 1000, credits
        )
        self.geometry = geometries[0]
        self.ranks = [self.worker, *(PeerKey(f"worker-{rank}", 10 + rank) for rank in range(1, ranks))]
        self.hellos = [
            msgspec.structs.replace(self.worker_hello, identity=key.identity, rank=rank, geometry=geometries[rank])
            for rank, key in enumerate(self.ranks)
        ]
        self.segment = self.old_segment(host)
        self._requests = 0
        self.feed(PeerUp(self.gateway, gateway.GatewayHello("gateway-0")))
        for key, hello in zip(self.ranks, self.hellos, strict=True):
            self.feed(PeerUp(key, hello))
            self.fenced(key)
        if host:
            self.feed(PeerUp(self.storage, self.storage_hello))
            self.fenced(self.storage)
            self.segment_opened()
            for rank, key in enumerate(self.ranks):
                self.answer(key, worker.SegmentMapped(self.take(worker.MapSegment).op_id, rank))

    # --- events -------------------------------------------------------------------------------------------------

    def feed(self, event: Event) -> None:
        """Give the core an event and keep what it sends."""
        for send in self.core.handle(event, self.now):
            message = send.message
            if isinstance(message, gateway.EmitTokens):
                self.emitted += [(each.request_id, int(unpack(each.tokens)[0])) for each in message.emissions]
            elif isinstance(message, gateway.Finish | gateway.Reject):
                self.ended[message.request_id] = message
            elif not isinstance(message, common.Welcome):
                self.sent.append(message)
                self._receivers.append((message, send.peer))
        check_integrity(self.core)

    def answer(self, peer: PeerKey, message: common.Message) -> None:
        """A peer says something."""
        self.feed(Received(peer, message))

    def _storage_answers(self, command: Any, message: common.Message) -> None:
        at = next(at for at, (sent, _) in enumerate(self._receivers) if sent is command)
        _, peer = self._receivers.pop(at)
        self.answer(self.storage if peer.identity == self.storage.identity else peer, message)

    def refuse(self, peer: PeerKey, message: Any, reason: str = "full") -> None:
        """A peer can't do what it was told."""
        self.answer(peer, common.OperationFailed(message.op_id, 0, reason, -1, b""))

    def old_segment(self, pages: int, epoch: int = SEGMENT) -> storage.SegmentInfo:
        """A segment of so many usable pages."""
        return storage.SegmentInfo("storage-0", "/sim", epoch, pages + 1, 1, pages, self.geometry, MODEL)

    def restart_storage(self) -> None:
        """The storage's process is replaced; the worker drops the old segment and maps a new one."""
        pages, epoch = self.segment.page_count, self.segment.epoch
        self.storage = PeerKey(self.storage.identity, self.storage.epoch + 10)
        self.sent = [message for message in self.sent if not isinstance(message, storage.PrefetchPages)]
        self.storage_hello = msgspec.structs.replace(
            self.storage_hello, holders=[storage.Holder("worker-0", self.worker.epoch, epoch)]
        )
        self.segment = self.old_segment(pages, epoch + 1)
        self.feed(PeerUp(self.storage, self.storage_hello))
        self.fenced(self.storage)
        self.answer(self.worker, worker.SegmentDropped(self.take(worker.DropSegment).op_id, 0))
        self.segment_opened()
        self.answer(self.worker, worker.SegmentMapped(self.take(worker.MapSegment).op_id, 0))

    def restart_worker(self) -> None:
        """The worker's process is replaced; the storage sees that the old one has ended."""
        old, self.worker = self.worker, PeerKey(self.worker.identity, self.worker.epoch + 10)
        self.sent = [message for message in self.sent if not isinstance(message, worker.RunStep | worker.WritePages)]
        self.answer(self.storage, storage.PeerExited(old.identity, old.epoch, self.segment.epoch))
        self.sent = [message for message in self.sent if not isinstance(message, common.Fence)]
        self.feed(PeerUp(self.worker, self.worker_hello))
        self.fenced(self.worker)
        self.answer(self.worker, worker.SegmentMapped(self.take(worker.MapSegment).op_id, 0))

    def wait(self, seconds: float) -> None:
        """Time passes; the core is called whenever it wanted to be."""
        end = self.now + seconds
        while (deadline := self.core.next_deadline()) is not None and deadline <= end:
            self.now = max(self.now, deadline)
            self.feed(DeadlineReached())
        self.now = end

    def lose(self, peer: PeerKey) -> None:
        """Heartbeats are missing."""
        self.feed(PeerLost(peer))

    # --- what was sent ------------------------------------------------------------------------------------------

    def pending(self, kind: type[M]) -> list[M]:
        """Unanswered messages of a kind, oldest first."""
        return [message for message in self.sent if isinstance(message, kind)]

    def take(self, kind: type[M]) -> M:
        """The oldest unanswered message of a kind; the test answers it now."""
        found = self.pending(kind)
        assert found, f"no {kind.__name__} was sent, but {[type(each).__name__ for each in self.sent]}"
        self.sent.remove(found[0])
        return found[0]

    # --- requests -----------------------------------------------------------------------------------------------

    def submit(
        self, tokens: Iterable[int], *, max_tokens: int = 1, priority: int = 0, namespace: gateway.Namespace = DEFAULT,
        stops: Iterable[int] = (), timeout_s: float = 600.0,
    ) -> str:  # fmt: skip
        """A request arrives; returns its id."""
        self._requests += 1
        request_id = f"r{self._requests}"
        message = gateway.Submit(
            request_id, pack(tokens), max_tokens, list(stops), GREEDY, namespace, priority, timeout_s
        )
        self.answer(self.gateway, message)
        return request_id

    def abort(self, request_id: str) -> None:
        """The client has gone."""
        self.answer(self.gateway, gateway.Abort(request_id))

    def compute(self, tokens: Iterable[int], **options: Any) -> str:
        """Run a request to its end, everything that follows from it included."""
        request_id = self.submit(tokens, **options)
        self.settle()
        assert request_id in self.ended, f"{request_id} didn't end"
        return request_id

    # --- answers ------------------------------------------------------------------------------------------------

    def fenced(self, peer: PeerKey) -> None:
        """A process acks its Fence."""
        self.answer(peer, common.Fenced(self.take(common.Fence).op_id, 0))

    def segment_opened(self) -> None:
        """The storage opens its pool."""
        self.answer(self.storage, storage.SegmentOpened(self.take(storage.OpenSegment).op_id, self.segment))
        for release in self.pending(storage.ReleasePages):  # was it there before?
            self.sent.remove(release)
            self.answer(self.storage, storage.Released(release.op_id))

    def step_done(self, token: int = 7) -> worker.RunStep:
        """The oldest step ends; every sampled token is `token`."""
        step = self.take(worker.RunStep)
        sampled = [worker.Sampled(item.row, token, -0.1, b"", b"") for item in step.items if item.sampling is not None]
        self.answer(self.worker, worker.StepDone(step.op_id, 0, sampled, STEP_S))
        return step

    def step_failed(self, reason: str = "error") -> worker.RunStep:
        """The oldest step fails."""
        step = self.take(worker.RunStep)
        self.answer(self.worker, worker.StepFailed(step.op_id, 0, reason, []))
        return step

    def write_done(self) -> worker.WritePages:
        """The oldest backup's copy ends."""
        write = self.take(worker.WritePages)
        self.answer(self.worker, worker.WriteDone(write.op_id, 0, b"sums" * len(unpack(write.host_pages)), 0.0))
        return write

    def committed(self) -> storage.CommitPages:
        """The oldest commit is acked."""
        commit = self.take(storage.CommitPages)
        self._storage_answers(commit, storage.Committed(commit.op_id))
        return commit

    def released(self) -> storage.ReleasePages:
        """The oldest release is acked."""
        release = self.take(storage.ReleasePages)
        self._storage_answers(release, storage.Released(release.op_id))
        return release

    def archived(self) -> storage.ArchivePages:
        """The oldest archive ends."""
        archive = self.take(storage.ArchivePages)
        self._storage_answers(archive, storage.ArchiveDone(archive.op_id, pack(range(len(unpack(archive.pages)))), 0.0))
        return archive

    def load_done(self) -> worker.LoadPages:
        """The oldest load ends well."""
        load = self.take(worker.LoadPages)
        self.answer(self.worker, worker.LoadDone(load.op_id, 0, self.load_s))
        return load

    def load_failed(self, *positions: int, reason: str = "checksum") -> worker.LoadPages:
        """The oldest load fails at these positions of its page list."""
        load = self.take(worker.LoadPages)
        self.answer(self.worker, common.OperationFailed(load.op_id, 0, reason, 0, pack(positions)))
        return load

    def found(self, hits: int) -> storage.FindPages:
        """The oldest lookup is answered."""
        find = self.take(storage.FindPages)
        self._storage_answers(find, storage.Found(find.op_id, hits))
        return find

    def prefetch_done(self, *named: int) -> storage.PrefetchPages:
        """The oldest prefetch ends with these positions named."""
        prefetch = self.take(storage.PrefetchPages)
        self._storage_answers(prefetch, storage.PrefetchDone(prefetch.op_id, pack(named), 0, self.fetch_s))
        return prefetch

    def settle(self, *hold: type) -> None:
        """Answer everything well, lookups with "nothing", except messages of the kinds in `hold`."""
        answers = {
            worker.LoadPages: self.load_done, worker.RunStep: self.step_done, worker.WritePages: self.write_done,
            storage.CommitPages: self.committed, storage.ReleasePages: self.released,
            storage.ArchivePages: self.archived, storage.FindPages: lambda: self.found(0),
            storage.PrefetchPages: self.prefetch_done,
        }  # fmt: skip
        for _ in range(1000):
            ready = [kind for kind in answers if kind not in hold and self.pending(kind)]
            if not ready:
                return
            answers[ready[0]]()
        raise AssertionError("the core never comes to rest")

    # --- state --------------------------------------------------------------------------------------------------

    @property
    def pool(self) -> HostPool:
        """The host pool."""
        return next(iter(self.core.host.pools.values()))

    def match(self, tokens: Iterable[int], namespace: gateway.Namespace = DEFAULT) -> Match:
        """What the tree has of whole pages of `tokens`."""
        seed = namespace_seed(namespace.tenant, namespace.lora_id, namespace.extra_key)
        data = pack(tokens)
        return self.core.state.tree.match_prefix(seed, data, len(data) // 4 // self.page_size)

    def nodes(self) -> list[Node]:
        """Nodes with pages, parents first."""
        return [node for node in self.core.state.tree.nodes() if not node.is_root]

    def evict_device(self, pages: int) -> None:
        """Memory is short by so many device pages."""
        self.core.device.evict(pages)
        self.feed(DeadlineReached())

    def evict_host(self, pages: int) -> None:
        """Host memory is short until so many pages are free."""
        self.core.host.evict_host(self.pool, pages)
        self.feed(DeadlineReached())

    def nothing_left(self) -> None:
        """No lock, pin, operation, row or reservation is left."""
        core = self.core
        assert not core.requests.all
        assert not core.state.operations.table
        assert not core.state.tree.locks
        assert core.state.tree.protected == 0
        assert core.state.device.available + core.state.tree.evictable == core.state.device.total
        assert len(core.requests.rows) == self.worker_hello.max_requests
        for pool in core.host.pools.values():
            assert not pool.pins.any()
            assert (pool.prefetching, pool.archiving, pool.releasing) == (0, 0, 0)
