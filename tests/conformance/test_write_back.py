"""write_back: backed up at eviction, freed at its Committed; to L3 when the host evicts (TIER-01, 02, 04, 05)."""

from shared.messages.storage import ArchivePages, CommitPages, ReleasePages
from shared.messages.worker import RunStep, WritePages
from shared.packed import unpack
from tests.conformance.harness import Harness

A = list(range(1, 9))  # four pages
OTHER = list(range(40, 48))


def _core(**options: object) -> Harness:
    return Harness(prefetch=False, write_policy="write_back", **options)  # type: ignore[arg-type]


def test_tier_01_write_back_backs_nothing_up_before_an_eviction() -> None:
    core = _core()
    for last in (9, 10, 11):
        core.compute([*A, last])
    assert core.core.state.counters["backup_pages"] == 0
    assert core.nodes()[0].hit_count == 3  # LFU and SLRU need them under every policy


def test_tier_02_write_back_doesn_t_wait_for_the_parent() -> None:
    core = _core()
    core.compute([*A, 9])
    core.match(A[:4])  # two nodes
    core.evict_device(1)
    assert len(unpack(core.take(WritePages).device_pages)) == 2
    upper, lower = core.nodes()
    assert lower.writing is not None
    assert (upper.host, upper.writing) == (None, None)


def test_tier_02_write_back_keeps_the_node_locked_until_committed() -> None:
    core = _core()
    core.compute([*A, 9])
    core.evict_device(1)
    (node,) = core.nodes()
    for step in (core.write_done, core.committed):
        assert (node.host, node.lock_ref) == (None, 1)
        assert node.value is not None
        step()
    assert node.host is not None
    assert (node.lock_ref, node.value) == (0, None)


def test_tier_04_write_back_frees_the_pages_at_committed_and_the_waiting_request_goes_on() -> None:
    core = _core(device=6)
    core.compute([*A, 9])
    request = core.submit([*OTHER, 9])
    core.settle(WritePages)
    assert request not in core.ended
    core.write_done()
    assert not core.pending(RunStep)
    core.committed()
    assert core.pending(RunStep)
    core.settle()
    assert core.ended[request].reason == "length"
    assert core.match(A).host_pages == 4
    core.nothing_left()


def test_tier_04_write_back_evicts_no_more_while_pages_are_on_their_way() -> None:
    core = _core(device=10)
    core.compute([*A, 9])
    core.compute([*OTHER, 9])
    core.submit(range(60, 67))  # four pages: two are short, one node is enough
    for _ in range(3):
        core.wait(0.1)
        core.match([1])
    assert len(core.pending(WritePages)) == 1
    core.settle()
    core.nothing_left()


def test_tier_04_write_back_keeps_a_node_that_was_matched_meanwhile() -> None:
    core = _core()
    core.compute([*A, 9])
    core.evict_device(1)
    core.match(A)
    core.settle()
    (node,) = core.nodes()
    assert node.host is not None
    assert node.value is not None


def test_tier_05_write_back_archives_before_it_releases() -> None:
    core = _core()
    core.compute([*A, 9])
    core.evict_device(4)
    core.settle()
    assert core.core.state.counters["archive_ended_pages"] == 0
    core.evict_host(24)
    assert len(unpack(core.pending(ArchivePages)[0].pages)) == 4
    assert not core.pending(ReleasePages)
    core.archived()
    core.evict_host(24)
    assert not core.pending(ArchivePages)
    assert len(unpack(core.take(ReleasePages).pages)) == 4


def test_tier_05_write_back_releases_at_once_when_the_archive_queue_is_full() -> None:
    core = _core(host=12)
    for start in (1, 20):
        core.compute(range(start, start + 9))
        core.evict_device(4)
        core.settle()
    core.evict_host(12)
    assert core.core.state.counters["archive_dropped_pages"] == 8  # four pages are more than a quarter of twelve
    assert len(unpack(core.take(ReleasePages).pages)) == 8


def test_store_05_write_back_sends_nothing_to_l3_at_committed() -> None:
    core = _core()
    core.compute([*A, 9])
    core.evict_device(1)
    core.write_done()
    core.committed()
    assert not core.pending(ArchivePages)


def test_sc_12_a_load_with_both_tiers_full_never_takes_its_own_source_pages() -> None:
    core = _core(device=6, host=4, backend=False)
    core.compute([*A, 9])
    core.evict_device(4)
    core.settle()
    core.compute([*OTHER, 9])  # the host is full with A, the device with OTHER
    source = set(core.nodes()[0].host.pages.tolist()) if core.nodes()[0].host else set()
    request = core.submit([*A, 9])
    written = {page for write in core.pending(WritePages) for page in unpack(write.host_pages).tolist()}
    assert not (core.match(A).host_pages and written & source)
    core.settle()
    assert core.ended[request].reason == "length"
    core.nothing_left()


def test_sc_13_with_every_host_page_in_use_an_eviction_frees_without_a_copy() -> None:
    core = _core(host=3, device=6)  # a node of four pages never fits
    core.compute([*A, 9])
    request = core.submit([*OTHER, 9])
    assert core.pending(RunStep)
    core.settle()
    assert core.ended[request].reason == "length"
    assert core.match(A).device_pages == 1  # three were short
    assert core.core.state.counters["backup_dropped_no_host_page"] == 4
    core.nothing_left()


def test_sc_13_a_backup_that_fails_is_not_tried_for_ever() -> None:
    core = _core(device=6)
    core.compute([*A, 9])
    request = core.submit([*OTHER, 9])
    core.refuse(core.worker, core.take(WritePages), "error")
    core.settle(WritePages, CommitPages)
    assert core.ended[request].reason == "length"
    assert not core.pending(WritePages)
