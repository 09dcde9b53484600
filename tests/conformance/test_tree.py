"""TREE-01..10, ALLOC-01, ALLOC-02: the prefix cache and its pages, through the core."""

import pytest

from services.scheduler.core.core import Core
from services.scheduler.core.integrity import check_integrity
from services.scheduler.core.settings import CoreSettings
from shared.errors import IntegrityError
from shared.messages.gateway import Namespace
from shared.messages.worker import RunStep, WritePages
from shared.packed import unpack
from shared.page_hash import chain
from tests.conformance.harness import Harness

A, B = list(range(1, 9)), [1, 2, 3, 4, 25, 26, 27, 28]


def test_tree_01_a_node_knows_its_span() -> None:
    core = Harness()
    core.compute(A)
    (node,) = core.nodes()
    assert (node.pages, node.evicted, node.backuped, node.lock_ref, node.hit_count) == (4, False, True, 0, 1)
    assert node.parent is not None
    assert node.parent.is_root


def test_tree_02_whole_pages_only_and_never_the_last_token() -> None:
    core = Harness()
    core.compute([*A, 9])
    for length, cached in [(8, 6), (9, 8), (7, 6), (2, 0)]:
        request = core.compute([*A, 9][:length])
        assert core.ended[request].usage.device_hit_tokens == cached


def test_tree_03_a_match_inside_a_node_splits_it_and_copies_nothing() -> None:
    core = Harness()
    core.compute(A)
    (node,) = core.nodes()
    before = node.value.tolist() if node.value is not None else []
    core.compute(B)
    shared = core.match(A).device
    assert [part.pages for part in shared] == [2, 2]
    assert [page for part in shared if part.value is not None for page in part.value.tolist()] == before
    digests = [digest for part in shared for digest in core.core.state.tree.digests(part)]
    assert digests == list(chain(b"", core.core.state.tree.match_prefix(b"", b"", 0).end.key + _packed(A), 2))


def _packed(tokens: list[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in tokens)


def test_tree_04_namespaces_are_framed_fields() -> None:
    core = Harness()
    first, second = Namespace("a", "bc"), Namespace("ab", "c")
    core.compute([*A, 9], namespace=first)
    assert core.match(A, second).end.is_root
    assert core.match(A).end.is_root
    request = core.compute([*A, 9], namespace=second)
    assert core.ended[request].usage.device_hit_tokens == 0
    assert core.match(A, first).device_pages == 4


def test_tree_05_duplicates_are_freed_at_once() -> None:
    core = Harness(host=0)
    core.submit([*A, 9])
    core.submit([*A, 9])
    core.settle()
    assert core.match(A).device_pages == 4
    assert core.core.state.device.available == 12 - 4
    core.nothing_left()


def test_tree_05_fresh_pages_revive_an_evicted_node_that_keeps_its_host_copy() -> None:
    core = Harness(load_back_threshold=100)
    core.compute([*A, 9])
    core.evict_device(4)
    (node,) = core.nodes()
    assert node.evicted
    host = node.host
    core.compute([*A, 9])
    assert not node.evicted
    assert node.host == host


def test_tree_06_an_unlock_releases_what_its_own_lock_took_after_a_split() -> None:
    core = Harness(host=0)
    core.compute([*A, 9])
    core.submit([*A, 10])
    assert core.core.state.tree.protected == 4
    core.match(B)  # splits the locked node
    assert [node.lock_ref for node in core.match(A).device] == [1, 1]
    core.settle()
    core.nothing_left()


def test_tree_07_a_chunked_prompt_joins_the_tree_between_its_chunks() -> None:
    core = Harness(host=0, token_budget=3)
    core.submit([*A, 9])
    core.step_done()
    assert core.match(A).device_pages == 1
    core.step_done()
    assert core.match(A).device_pages == 3
    core.settle()
    assert core.match(A).device_pages == 4
    core.nothing_left()


def test_tree_07_a_step_that_overshoots_the_end_keeps_its_slots_until_it_is_done() -> None:
    core = Harness(host=0, max_steps=2)
    request = core.submit(A, max_tokens=4, stops=[7])
    assert len(core.pending(RunStep)) == 2  # the second runs ahead
    core.step_done(7)
    assert request in core.ended
    assert len(core.core.requests.draining) == 1
    assert core.core.state.device.available < 12 - 4
    core.step_done()
    core.nothing_left()
    assert core.core.state.device.available == 12 - 4  # the token beyond the end left no page


def test_tree_08_a_leaf_is_evicted_only_when_nothing_below_it_has_a_value() -> None:
    core = Harness(host=0)
    core.compute([*A, 9])
    core.compute([*B, 9])
    core.evict_device(2)
    assert core.match(A).device_pages == 2  # the older leaf, and not their common parent
    assert core.match(B).device_pages == 4


def test_tree_09_priority_is_raised_along_the_path_and_decides_what_stays() -> None:
    core = Harness(host=0, eviction="priority")
    core.compute([*A, 9], priority=3)
    core.compute([20, 21, 22, 23, 24], priority=0)
    core.evict_device(2)
    assert core.match([20, 21, 22, 23]).device_pages == 0
    assert core.match(A).device_pages == 4
    core.compute([*B, 9], priority=5)
    assert [node.priority for node in core.match(B).device] == [5, 5]
    assert core.match(A).device[-1].priority == 3


def test_tree_10_a_page_in_two_places_or_in_none_is_named() -> None:
    core = Harness(host=0)
    core.compute([*A, 9])
    (node,) = core.nodes()
    assert node.value is not None
    stolen = node.value[:1].copy()
    core.core.state.device.free(stolen)
    with pytest.raises(IntegrityError, match=f"page {stolen[0]} is held by"):
        check_integrity(core.core)
    core.core.state.device.alloc(1)
    check_integrity(core.core)
    core.core.state.device.alloc(1)
    with pytest.raises(IntegrityError, match="held by nobody"):
        check_integrity(core.core)


def test_tree_10_a_leaf_whose_entry_is_lost_or_is_no_more_is_noticed() -> None:
    core = Harness(host=0)
    core.compute([*A, 9])
    (node,) = core.nodes()
    entry, leaves = node.device_entry, core.core.state.tree.device_leaves
    node.device_entry = None
    with pytest.raises(IntegrityError, match="that eviction can't see"):
        check_integrity(core.core)
    node.device_entry = entry
    check_integrity(core.core)
    leaves._queue.clear()
    with pytest.raises(IntegrityError, match="entries of evictable leaves"):
        check_integrity(core.core)


def test_tree_10_an_idle_core_is_sound() -> None:
    check_integrity(Core(CoreSettings()))


def test_alloc_01_pages_of_one_token() -> None:
    core = Harness(host=0, page_size=1)
    core.compute([1, 2, 3], max_tokens=3)
    assert core.match([1, 2, 3, 7, 7]).device_pages == 5
    request = core.compute([1, 2, 3, 7, 7])
    assert core.ended[request].usage.device_hit_tokens == 4  # the last token is computed
    core.nothing_left()


def test_alloc_02_a_decode_step_takes_a_page_only_when_the_last_is_full() -> None:
    core = Harness(host=0)
    core.submit([1, 2, 3], max_tokens=5)
    given = []
    while core.pending(RunStep):
        given.append(len(unpack(core.step_done().items[0].pages)))
    assert given == [2, 0, 1, 0, 1]


def test_alloc_02_a_request_that_never_fits_is_refused_and_one_that_must_wait_waits() -> None:
    core = Harness(host=0, device=6)
    refused = core.submit(range(1, 14))
    assert core.ended[refused].code == 400
    first = core.submit(range(1, 9), max_tokens=2)
    second = core.submit(range(20, 28), max_tokens=2)
    assert [len(step.items) for step in core.pending(RunStep)] == [1]
    core.settle()
    assert core.ended.keys() >= {first, second}
    core.nothing_left()


def test_alloc_02_freed_ids_are_not_handed_out_while_a_copy_reads_them() -> None:
    core = Harness(device=6, prefetch=False)
    core.submit([*A, 9])
    core.step_done()
    (write,) = core.pending(WritePages)
    reading = set(unpack(write.device_pages).tolist())
    core.submit(range(30, 38))
    used = {page for step in core.pending(RunStep) for item in step.items for page in unpack(item.pages).tolist()}
    assert not used & reading
    core.settle()
    core.nothing_left()
