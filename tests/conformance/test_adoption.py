"""A new scheduler goes on with the host pages that the one before has left."""

import msgspec

from services.scheduler.core.events import PeerUp
from services.scheduler.core.settings import INVENTORY_CHUNK
from shared.messages.common import HelloWanted, OperationFailed
from shared.messages.storage import (
    Adopted,
    AdoptPages,
    FindPages,
    Inventory,
    ListPages,
    OpenSegment,
    ReleasePages,
    SegmentOpened,
)
from shared.messages.worker import LoadPages, MapSegment, SegmentMapped
from shared.packed import pack, unpack
from shared.page_hash import chain
from tests.conformance.harness import SEGMENT, Harness

A = list(range(1, 9))
DIGESTS = list(chain(b"", pack(A), 2))


def a_core_that_finds(named: dict[int, bytes], *, pages: int = 24, **settings: object) -> Harness:
    """A scheduler that finds a storage whose segment has `named` pages."""
    core = Harness(host=0, **({"adoption": True, "host_tier": True} | settings))  # type: ignore[arg-type]
    core.segment = core.old_segment(pages)
    core.storage_hello = msgspec.structs.replace(core.storage_hello, segment=core.segment)
    core.feed(PeerUp(core.storage, core.storage_hello))
    core.fenced(core.storage)
    while core.pending(ListPages):
        part = core.take(ListPages)
        here = [page for page in named if part.first_page <= page < part.first_page + part.count]
        core.answer(core.storage, Inventory(part.op_id, pack(here), b"".join(named[page] for page in here)))
    core.answer(core.worker, SegmentMapped(core.take(MapSegment).op_id, 0))
    return core


def named_pages(first: int = 5) -> dict[int, bytes]:
    """A's pages by the numbers that they have in a segment."""
    return dict(enumerate(DIGESTS, first))


def test_adoption_pages_of_an_earlier_scheduler_are_orphaned_until_a_chain_reaches_them() -> None:
    core = a_core_that_finds(named_pages())
    assert core.pool.available == 20
    assert not core.pending(ReleasePages)
    assert core.match(A).end.is_root
    request = core.submit([*A, 9])
    adopt = core.take(AdoptPages)
    assert unpack(adopt.pages).tolist() == [5, 6, 7, 8]
    assert adopt.digests == b"".join(DIGESTS)
    assert not core.pending(LoadPages)  # the ack precedes use
    core.answer(core.storage, Adopted(adopt.op_id, pack(range(4))))
    assert unpack(core.pending(LoadPages)[0].host_pages).tolist() == [5, 6, 7, 8]
    core.settle()
    assert core.ended[request].usage.host_hit_tokens == 8
    core.nothing_left()


def test_adoption_takes_a_message_s_time_so_best_effort_waits_for_it() -> None:
    core = a_core_that_finds(named_pages(), prefetch_policy="best_effort")
    request = core.submit([*A, 9])
    core.answer(core.storage, Adopted(core.take(AdoptPages).op_id, pack(range(4))))
    core.settle()
    assert core.ended[request].usage.host_hit_tokens == 8
    core.nothing_left()


def test_store_06_a_lookup_does_not_wait_for_the_room_that_its_own_request_has_reserved() -> None:
    core = a_core_that_finds({5: DIGESTS[0]}, pages=7, prefetch_policy="wait_complete", prefetch_threshold=2)
    request = core.submit([*A, 9])
    adopt = core.take(AdoptPages)
    core.answer(core.storage, Adopted(adopt.op_id, pack(range(1))))
    core.found(3)  # a quarter of the pool, which prefetches may hold, is one page: the adopted one
    core.settle()
    assert core.ended[request].usage.host_hit_tokens == 2
    core.nothing_left()


def test_adoption_is_asked_for_in_bounded_parts_each_answered_once() -> None:
    pages = INVENTORY_CHUNK + 10
    core = Harness(host=0, adoption=True, host_tier=True)
    core.storage_hello = msgspec.structs.replace(core.storage_hello, segment=core.old_segment(pages))
    core.feed(PeerUp(core.storage, core.storage_hello))
    core.fenced(core.storage)
    first = core.take(ListPages)
    assert (first.first_page, first.count) == (1, INVENTORY_CHUNK)
    for _ in range(2):  # the answer comes twice
        core.answer(core.storage, Inventory(first.op_id, pack([5]), DIGESTS[0]))
    (second,) = core.pending(ListPages)
    assert (second.first_page, second.count) == (INVENTORY_CHUNK + 1, 10)
    core.answer(core.storage, OperationFailed(second.op_id, 0, "error", -1, b""))
    core.sent.clear()
    core.wait(6.0)
    again = core.take(ListPages)
    assert (again.first_page, again.count) == (INVENTORY_CHUNK + 1, 10)
    core.answer(core.storage, Inventory(again.op_id, b"", b""))
    core.answer(core.worker, SegmentMapped(core.take(MapSegment).op_id, 0))
    assert (core.pool.total, core.pool.available) == (pages, pages - 1)


def test_adoption_uses_the_leading_pages_and_asks_l3_for_the_rest() -> None:
    core = a_core_that_finds({5: DIGESTS[0], 6: DIGESTS[1]})
    core.submit([*A, 9])
    adopt = core.take(AdoptPages)
    core.answer(core.storage, Adopted(adopt.op_id, pack(range(2))))
    assert core.take(FindPages).digests == b"".join(DIGESTS[2:])


def test_adoption_a_segment_that_is_there_no_more_is_asked_for_by_a_new_hello() -> None:
    core = Harness(host=0, adoption=True, host_tier=True)
    old, new = core.old_segment(24), core.old_segment(24, SEGMENT + 1)
    core.storage_hello = msgspec.structs.replace(core.storage_hello, segment=old)
    core.feed(PeerUp(core.storage, core.storage_hello))
    core.fenced(core.storage)
    core.answer(core.storage, OperationFailed(core.take(ListPages).op_id, 0, "segment", -1, b""))
    core.take(HelloWanted)
    core.feed(PeerUp(core.storage, msgspec.structs.replace(core.storage_hello, segment=new)))
    core.fenced(core.storage)
    assert core.take(ListPages).segment_epoch == new.epoch


def test_adoption_of_a_page_that_has_lost_its_name_is_a_miss() -> None:
    core = a_core_that_finds(named_pages())
    request = core.submit([*A, 9])
    adopt = core.take(AdoptPages)
    core.answer(core.storage, Adopted(adopt.op_id, pack([0, 2, 3])))
    core.settle()
    assert core.ended[request].usage.host_hit_tokens == 2
    core.nothing_left()


def test_adoption_orphans_go_first_when_memory_is_short() -> None:
    core = a_core_that_finds({1: b"x" * 32, 2: b"y" * 32, **named_pages()}, pages=9, prefetch=False)
    core.submit(range(40, 49))
    core.step_done()
    assert unpack(core.take(ReleasePages).pages).tolist() == [1]  # three pages are free, four are needed


def test_adoption_two_pages_of_one_name_leave_one() -> None:
    core = a_core_that_finds({5: DIGESTS[0], 6: DIGESTS[0]})
    assert unpack(core.take(ReleasePages).pages).tolist() == [6]
    assert len(core.pool.orphans) == 1


def test_adoption_is_not_asked_for_when_the_geometry_differs() -> None:
    core = Harness(host=0, adoption=True, host_tier=True)
    other = msgspec.structs.replace(core.geometry, layers=2)
    offered = msgspec.structs.replace(core.old_segment(8), geometry=other)
    core.feed(PeerUp(core.storage, msgspec.structs.replace(core.storage_hello, segment=offered)))
    core.fenced(core.storage)
    assert not core.pending(ListPages)
    assert core.pending(OpenSegment)


def test_adoption_without_the_setting_everything_is_released() -> None:
    core = Harness(host=0)
    core.feed(PeerUp(core.storage, msgspec.structs.replace(core.storage_hello, segment=core.old_segment(8))))
    core.fenced(core.storage)
    assert len(unpack(core.take(ReleasePages).pages)) == 8


def test_tree_10_the_sum_has_a_term_for_orphaned_pages() -> None:
    core = a_core_that_finds(named_pages())
    assert core.pool.available + len(core.pool.orphans) == core.pool.total  # and `feed` has checked the rest


def test_adoption_of_a_segment_that_was_opened_after_the_storage_s_hello() -> None:
    core = Harness(host=0, adoption=True, host_tier=True)
    core.feed(PeerUp(core.storage, core.storage_hello))  # it has no segment yet, but another scheduler's OpenSegment
    core.fenced(core.storage)
    core.answer(core.storage, SegmentOpened(core.take(OpenSegment).op_id, core.old_segment(8)))
    part = core.take(ListPages)
    core.answer(core.storage, Inventory(part.op_id, pack([5]), DIGESTS[0]))
    core.answer(core.worker, SegmentMapped(core.take(MapSegment).op_id, 0))
    assert core.pool.available == 7


def test_adoption_of_the_segment_in_the_newest_hello() -> None:
    core = Harness(host=0, adoption=True, host_tier=True)
    core.feed(PeerUp(core.storage, core.storage_hello))
    core.feed(PeerUp(core.storage, msgspec.structs.replace(core.storage_hello, segment=core.old_segment(8))))
    core.fenced(core.storage)
    assert not core.pending(OpenSegment)
    assert core.pending(ListPages)
