"""Several storages: where a node's host copy goes, whom a lookup asks, what a storage's end costs."""

import msgspec
import pytest

from services.scheduler.core.events import DeadlineReached, PeerKey, PeerUp
from services.scheduler.core.settings import SLOW_START_S
from shared.messages.common import HelloWanted, OperationFailed
from shared.messages.gateway import Administer, Administered
from shared.messages.storage import BackendInfo, FindPages, Found, Holder, OpenSegment, PrefetchPages, SegmentOpened
from shared.messages.worker import DropSegment, LoadPages, MapSegment, SegmentMapped, WritePages
from shared.packed import pack, unpack
from tests.conformance.harness import SEGMENT, Harness

A = list(range(1, 9))
OTHER = list(range(40, 48))


class Two(Harness):
    """storage-0 with `host` pages, storage-1 with `second`."""

    def __init__(self, *, host: int = 24, second: int = 24, backend_id: str = "l3-1", **options: object) -> None:
        super().__init__(host=host, **options)  # type: ignore[arg-type]
        self.other = PeerKey("storage-1", 7)
        backend = BackendInfo(backend_id, "memory", False, True, 0)
        hello = msgspec.structs.replace(self.storage_hello, identity="storage-1", backend=backend, holders=[])
        self.feed(PeerUp(self.other, hello))
        self.fenced(self.other)
        segment = msgspec.structs.replace(self.old_segment(second, SEGMENT + 1), storage_id="storage-1")
        self.answer(self.other, SegmentOpened(self.take(OpenSegment).op_id, segment))
        self.released()
        self.answer(self.worker, SegmentMapped(self.take(MapSegment).op_id, 0))

    def where(self, tokens: list[int]) -> list[str]:
        """The storage of each node of a path."""
        match = self.match(tokens)
        return [node.host.pool.storage_id for node in [*match.device, *match.host] if node.host is not None]

    def written(self) -> str:
        """The storage that the oldest backup goes to."""
        return self.pending(WritePages)[0].storage_id


def test_spans_a_new_storage_starts_slowly_and_then_gets_what_has_no_parent() -> None:
    core = Two(host=20, prefetch=False)
    core.wait(SLOW_START_S)
    core.now -= SLOW_START_S * 0.9
    core.compute([*A, 9])
    first = core.where(A)
    core.now += 2 * SLOW_START_S
    core.compute([*OTHER, 9])
    assert {*first, *core.where(OTHER)} == {"storage-0", "storage-1"} or core.where(OTHER) == ["storage-1"]


def test_spans_a_child_goes_to_its_parent_s_storage_if_that_has_room() -> None:
    core = Two(host=10, second=40, prefetch=False, token_budget=4)
    core.now += 2 * SLOW_START_S
    core.compute([*A, 9])
    assert len(set(core.where(A))) == 1


def test_spans_a_child_goes_elsewhere_when_its_parent_s_storage_is_full() -> None:
    core = Two(host=5, second=4, prefetch=False, token_budget=8, backend=False)
    core.now += 2 * SLOW_START_S
    core.compute(A[:7])  # three pages, to the one with most room
    assert core.where(A[:6]) == ["storage-0"]
    core.compute([*range(1, 7), 30, 31, 32, 33, 34])  # two more pages than that
    assert core.where([*range(1, 7), 30, 31])[0] == "storage-0"
    core.compute([*range(1, 7), 50, 51, 52, 53, 54, 55, 56])
    assert set(core.where([*range(1, 7), 50, 51, 52, 53, 54, 55])) == {"storage-0", "storage-1"}
    core.nothing_left()


def test_spans_a_chain_over_two_storages_is_loaded_by_one_command_each() -> None:
    core = Two(host=5, second=4, prefetch=False, backend=False)
    core.now += 2 * SLOW_START_S
    prompt = [*range(1, 7), 50, 51, 52, 53, 54, 55]
    core.compute(A[:7])
    core.compute([*prompt, 9])
    core.evict_device(12)
    assert core.match(prompt).host_pages == 6
    core.submit([*prompt, 9])
    assert [load.storage_id for load in core.pending(LoadPages)] == ["storage-0", "storage-1"]
    core.settle()
    core.nothing_left()


@pytest.mark.parametrize("on_device", [True, False])
def test_spans_a_drained_storage_doesn_t_wait_for_what_follows_its_pages_elsewhere(on_device: bool) -> None:
    core = Two(host=5, second=4, prefetch=False, backend=False)
    core.now += 2 * SLOW_START_S
    prompt = [*range(1, 7), 50, 51, 52, 53, 54, 55]
    core.compute(A[:7])
    core.compute([*prompt, 9])
    assert core.where(prompt) == ["storage-0", "storage-1"]
    if not on_device:
        core.evict_device(12)
    core.answer(core.gateway, Administer(1, "drain", "storage-0"))
    core.take(Administered)
    core.settle()
    pools = {pool.storage_id: pool for pool in core.core.host.pools.values()}
    assert (pools["storage-0"].cached, pools["storage-0"].available) == (0, 5)
    assert core.where(prompt) == (["storage-1"] if on_device else [])
    core.compute([*prompt, 9])
    core.nothing_left()


def test_spans_eviction_for_one_storage_touches_no_other() -> None:
    core = Two(host=8, second=8, prefetch=False, backend=False)
    core.now += 2 * SLOW_START_S
    for start in (1, 20, 40):
        core.compute(range(start, start + 9))
    pools = list(core.core.host.pools.values())
    held = [pool.total - pool.available for pool in pools]
    core.core.host.evict_host(pools[0], 8)
    core.feed(DeadlineReached())
    core.settle()
    assert pools[0].available == 8
    assert pools[1].total - pools[1].available == held[1]


def test_spans_a_lost_storage_s_spans_go_and_the_other_s_stay() -> None:
    core = Two(prefetch=False)
    core.now += 2 * SLOW_START_S
    core.compute([*A, 9])
    core.compute([*OTHER, 9])
    owner = core.where(A)[0]
    assert core.where(OTHER)[0] != owner
    if owner == "storage-1":
        core.storage, core.other = core.other, core.storage
    core.core.handle(PeerUp(core.storage._replace(epoch=99), core.storage_hello), core.now)
    assert core.where(A) == []
    assert len(core.where(OTHER)) == 1


def test_spans_each_distinct_l3_is_asked_once_and_the_longest_hit_wins() -> None:
    core = Two()
    core.now += 2 * SLOW_START_S
    core.submit([*A, 9])
    (one, two) = core.pending(FindPages)
    assert one.op_id == two.op_id
    core.sent.clear()
    core.answer(core.storage, Found(one.op_id, 2))
    assert not core.pending(PrefetchPages)
    core.answer(core.other, Found(one.op_id, 4))
    prefetch = core.take(PrefetchPages)
    assert (prefetch.segment_epoch, len(unpack(prefetch.pages))) == (SEGMENT + 1, 4)


def test_spans_storages_with_one_l3_get_one_question() -> None:
    core = Two(backend_id="l3")
    core.submit([*A, 9])
    assert len(core.pending(FindPages)) == 1


def test_spans_a_storage_that_is_lost_in_a_lookup_counts_as_no_hit() -> None:
    core = Two()
    core.now += 2 * SLOW_START_S
    core.submit([*A, 9])
    op_id = core.pending(FindPages)[0].op_id
    core.sent.clear()
    core.lose(core.storage)
    core.answer(core.other, Found(op_id, 4))
    assert core.pending(PrefetchPages)


def test_a_segment_that_a_worker_did_not_map_is_mapped_after_a_while() -> None:
    core = Harness(host=0)
    core.feed(PeerUp(core.storage, core.storage_hello))
    core.fenced(core.storage)
    core.segment = core.old_segment(8)
    core.segment_opened()
    core.refuse(core.worker, core.take(MapSegment), "error")
    core.wait(6.0)
    core.answer(core.worker, SegmentMapped(core.take(MapSegment).op_id, 0))
    assert core.pool.usable


def test_a_segment_that_a_worker_did_not_drop_is_dropped_after_a_while() -> None:
    core = Harness(holders=[Holder("worker-0", 2, 33)])
    core.refuse(core.worker, core.take(DropSegment), "error")
    core.wait(6.0)
    assert core.take(DropSegment).segment_epoch == 33


def test_a_storage_without_memory_is_asked_who_holds_it() -> None:
    core = Harness(host=0)
    core.feed(PeerUp(core.storage, core.storage_hello))
    core.fenced(core.storage)
    core.answer(core.storage, OperationFailed(core.take(OpenSegment).op_id, 0, "full", -1, pack([])))
    assert core.pending(HelloWanted)
    holders = [Holder("worker-0", core.worker.epoch, 33)]  # mapped for an earlier scheduler after the first hello
    core.feed(PeerUp(core.storage, msgspec.structs.replace(core.storage_hello, holders=holders)))
    core.fenced(core.storage)
    assert core.take(DropSegment).segment_epoch == 33


def test_spans_a_storage_that_never_comes_back_is_forgotten_with_its_pool() -> None:
    core = Harness(prefetch=False, forget_storage_s=50.0)
    core.compute([*A, 9])
    assert core.pool.cached == 4
    core.lose(core.storage)
    core.wait(49.0)
    assert core.core.peers.storages
    core.wait(2.0)
    assert not core.core.peers.storages
    assert not core.core.host.pools
    assert all(node.host is None for node in core.nodes())
    assert core.take(DropSegment).segment_epoch == SEGMENT


def test_spans_a_forgotten_storage_that_comes_back_gets_a_fresh_segment() -> None:
    core = Harness(prefetch=False, forget_storage_s=50.0)
    core.compute([*A, 9])
    core.lose(core.storage)
    core.wait(51.0)
    core.feed(PeerUp(core.storage, msgspec.structs.replace(core.storage_hello, segment=core.segment)))
    core.fenced(core.storage)
    assert core.take(OpenSegment).fresh  # who still writes into the old one isn't known any more
