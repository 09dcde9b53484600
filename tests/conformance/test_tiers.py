"""TIER-01..11: device and host memory. (write_back, load-or-recompute and events come with later issues.)"""

import numpy as np
import pytest

from services.scheduler.core.settings import MAX_LOAD_FAILURES
from shared.messages.common import Cancelled
from shared.messages.storage import ArchivePages, CommitPages, FindPages, PrefetchPages, ReleasePages
from shared.messages.worker import LoadPages, RunStep, WritePages
from shared.packed import unpack
from tests.conformance.harness import Harness

A = list(range(1, 9))  # four pages
OTHER = list(range(40, 48))


def _on_host_only(core: Harness) -> None:
    """A is on the host, and no longer on the device."""
    core.compute([*A, 9])
    core.evict_device(4)
    assert (core.match(A).device_pages, core.match(A).host_pages) == (0, 4)


def test_tier_01_write_through_backs_up_at_the_first_insert() -> None:
    core = Harness(prefetch=False)
    core.submit([*A, 9])
    core.step_done()
    assert len(unpack(core.pending(WritePages)[0].device_pages)) == 4


def test_tier_01_selective_backs_up_at_the_second_use() -> None:
    core = Harness(prefetch=False, write_policy="write_through_selective")
    core.compute([*A, 9])
    assert core.nodes()[0].host is None
    core.submit([*A, 10])
    assert core.pending(WritePages)
    core.settle()
    assert core.nodes()[0].host is not None


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective"])
def test_tier_01_chunks_of_one_request_count_once(policy: str) -> None:
    core = Harness(prefetch=False, token_budget=2, write_policy=policy)
    core.compute([*A, 9])
    assert [node.hit_count for node in core.nodes()] == [1] * len(core.nodes())


def test_tier_02_a_backup_waits_for_its_parents() -> None:
    core = Harness(prefetch=False, token_budget=4)
    core.submit([*A, 9])
    core.step_done()
    core.step_done()
    assert len(core.pending(WritePages)) == 1  # the second chunk's parent isn't backed up yet
    core.write_done()
    core.committed()
    assert len(core.pending(WritePages)) == 1
    core.settle()
    assert all(node.host is not None for node in core.nodes())


def test_tier_02_the_host_copy_is_valid_at_committed_and_the_node_is_locked_until_then() -> None:
    core = Harness(prefetch=False)
    core.submit([*A, 9])
    core.step_done()
    (node,) = core.nodes()
    for step in (core.write_done, core.committed):
        assert node.host is None
        assert node.lock_ref == 1
        step()
    assert node.host is not None
    assert node.lock_ref == 0


def test_tier_02_a_short_host_pool_is_evicted_and_the_backup_goes_on_at_released() -> None:
    core = Harness(prefetch=False, host=5, device=20, backend=False)
    core.compute([*A, 9])
    core.submit([*OTHER, 9])
    core.step_done()
    assert not core.pending(WritePages)
    core.released()
    core.settle()
    assert core.match(OTHER).device[0].host is not None
    assert core.match(A).device[0].host is None
    core.nothing_left()


def test_tier_03_a_split_while_a_backup_is_in_flight_backs_up_both_parts() -> None:
    core = Harness(prefetch=False)
    core.submit([*A, 9])
    core.step_done()
    core.match([1, 2, 3, 4, 50, 51])
    assert len(core.nodes()) == 2
    core.write_done()
    core.committed()
    assert all(node.host is not None for node in core.nodes())
    assert len(unpack(core.archived().pages)) == 4
    core.nothing_left()


def test_tier_04_evicting_a_backed_up_leaf_keeps_the_node() -> None:
    core = Harness()
    _on_host_only(core)
    assert core.nodes()[0].evicted


def test_tier_04_evicting_a_leaf_without_a_host_copy_removes_it_with_what_hangs_on_it() -> None:
    core = Harness(prefetch=False)
    core.compute([*A, 9])
    core.match(A[:4])  # two nodes
    core.evict_device(1)  # the lower one stays on the host
    upper, lower = core.match(A).device[0], core.match(A).host[0]
    span = core.core.state.tree.drop_host(upper)
    core.core.host.release([span])
    core.evict_device(2)
    assert core.match(A).end.is_root
    assert lower.detached
    core.settle()
    assert core.pool.available == core.pool.total


def test_tier_04_only_the_shortfall_is_evicted() -> None:
    core = Harness(host=0, device=12)
    for start in (10, 20, 30):
        core.compute(range(start, start + 7))  # three pages each: 9 of 12
    core.compute(range(50, 59))  # five: two are short
    assert [core.match(range(start, start + 6)).device_pages for start in (10, 20, 30)] == [1, 3, 3]


def test_tier_05_evicted_host_pages_are_in_flight_until_released() -> None:
    core = Harness()
    _on_host_only(core)
    core.evict_host(24)
    assert core.match(A).end.is_root
    assert core.pool.available == 20
    core.released()
    assert core.pool.available == 24


def test_tier_05_and_09_copies_of_resident_nodes_go_first_only_in_a_small_host_pool() -> None:
    for host, first in [(10, "resident"), (24, "evicted")]:
        core = Harness(host=host, device=12 if host > 12 else 20, prefetch=False, load_back_threshold=1)
        core.compute([*A, 9])
        core.compute([*OTHER, 9])
        core.match(A)  # used last
        core.core.state.device.free(core.core.state.tree.drop_value(core.match(OTHER).device[0]))
        core.match(A)
        core.evict_host(core.pool.available + 1)
        core.settle()
        assert (core.match(OTHER).host == []) == (first == "evicted")
        assert (core.match(A).device[0].host is None) == (first == "resident")


def test_tier_06_a_load_takes_the_evicted_chain_and_the_step_waits_for_it() -> None:
    core = Harness()
    _on_host_only(core)
    core.submit([*A, 9])
    (load,), (step,) = core.pending(LoadPages), core.pending(RunStep)
    assert step.wait_for == [load.op_id]
    assert len(unpack(load.device_pages)) == 4
    assert unpack(step.items[0].pages).tolist()[:4] == unpack(load.device_pages).tolist()
    assert core.pool.pins[unpack(load.host_pages)].tolist() == [1] * 4
    core.load_done()
    assert not core.pool.pins.any()
    core.settle()
    core.nothing_left()


def test_tier_06_a_load_below_the_threshold_is_recomputed() -> None:
    core = Harness(load_back_threshold=10)
    _on_host_only(core)
    request = core.compute([*A, 9])
    assert core.ended[request].usage.host_hit_tokens == 0


def test_tier_06_source_pages_can_t_be_evicted_while_they_are_read() -> None:
    core = Harness()
    _on_host_only(core)
    core.submit([*A, 9])
    source = set(unpack(core.pending(LoadPages)[0].host_pages).tolist())
    assert not core.core.host.evict_host(core.pool, 24)
    assert not source & set(core.pool.free_pages().tolist())
    core.settle()
    core.nothing_left()


def test_tier_07_a_second_request_shares_the_load_and_waits_for_it() -> None:
    core = Harness(max_steps=2)
    _on_host_only(core)
    core.submit([*A, 9])
    core.submit([*A, 10])
    (load,) = core.pending(LoadPages)
    steps = core.pending(RunStep)
    assert [step.wait_for for step in steps] == [[load.op_id]] * len(steps)
    assert sum(len(step.items) for step in steps) == 2
    core.settle()
    core.nothing_left()


def test_tier_08_after_a_failed_load_the_good_part_stays_and_the_rest_is_recomputed() -> None:
    core = Harness()
    _on_host_only(core)
    request = core.submit([*A, 9])
    core.load_failed(2, 3)
    assert core.match(A).host_pages == 2
    assert request not in core.ended
    core.step_failed("load")
    core.settle()
    assert core.ended[request].usage.completion_tokens == 1
    core.nothing_left()


def test_tier_08_a_load_that_fails_for_no_page_s_fault_keeps_the_host_copy() -> None:
    core = Harness()
    _on_host_only(core)
    request = core.submit([*A, 9])
    for _ in range(MAX_LOAD_FAILURES):
        core.load_failed(reason="error")
        assert core.match(A).host_pages == 4
        core.step_failed("load")
    assert not core.pending(LoadPages)  # it has failed often enough: computed
    core.settle()
    assert core.ended[request].reason == "length"
    core.nothing_left()


def test_tier_09_a_host_pool_smaller_than_the_device_pool_still_takes_backups() -> None:
    core = Harness(device=24, host=6, prefetch=False, backend=False)
    for start in (10, 20, 30, 40):
        core.compute(range(start, start + 9))
    assert core.core.state.counters["backup_pages"] == 16
    core.nothing_left()


def test_tier_09_a_copy_that_made_room_is_not_written_again_before_its_next_hit() -> None:
    core = Harness(device=24, host=6, prefetch=False, backend=False)
    for start in (10, 20, 30, 40):
        core.compute(range(start, start + 9))
    written = core.core.state.counters["backup_pages"]
    shed = [node for node in core.core.state.tree.nodes() if node.shed]
    assert shed
    assert all(node.value is not None and node.host is None for node in shed)
    for node in shed:
        core.core.backup.consider(node)
    assert core.core.state.counters["backup_pages"] == written
    core.core.backup.count_hits([shed[0]], 0)
    assert not shed[0].shed
    assert shed[0].writing is not None or core.core.state.space_freed


def test_tier_10_the_order_of_a_backup_is_device_host_storage() -> None:
    core = Harness(prefetch=False)
    core.submit([*A, 9])
    kinds = (RunStep, WritePages, CommitPages, ArchivePages)
    for kind, step in zip(kinds, (core.step_done, core.write_done, core.committed, core.archived), strict=True):
        assert [type(message) for message in core.sent] == [kind]
        step()
    core.nothing_left()


STATES = ("lookup", "prefetching", "queued", "loading", "running", "between chunks", "step ahead")


@pytest.mark.parametrize("state", STATES)
def test_tier_11_an_abort_in_any_state_leaves_nothing_behind(state: str) -> None:
    ahead = state == "step ahead"
    core = Harness(token_budget=32 if ahead else 4, max_steps=1 + ahead, prefetch=state in STATES[:2])
    if state == "loading":
        _on_host_only(core)
    if state == "queued":
        core.submit(OTHER * 2)
    request = core.submit([*A, 9], max_tokens=3)
    match state:
        case "prefetching":
            core.found(4)
            assert core.pending(PrefetchPages)
        case "loading":
            assert core.pending(LoadPages)
        case "between chunks":
            core.step_done()
        case "lookup":
            assert core.pending(FindPages)
        case "step ahead":
            assert len(core.pending(RunStep)) == 2
    core.abort(request)
    assert core.ended[request].reason == "abort"
    core.settle()
    core.nothing_left()


def test_tier_11_late_answers_are_harmless() -> None:
    core = Harness()
    request = core.submit([*A, 9])
    core.found(4)
    core.abort(request)
    prefetch = core.take(PrefetchPages)
    core.answer(core.storage, Cancelled(prefetch.op_id, 0, np.array([0, 1], "<i4").tobytes()))
    core.answer(core.storage, Cancelled(prefetch.op_id, 0, b""))
    assert len(unpack(core.take(ReleasePages).pages)) == 2  # what had a name already
    assert core.core.state.counters["late_answers"] == 1
