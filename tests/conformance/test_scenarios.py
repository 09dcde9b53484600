"""SC-..: faults that users of other systems reported, as far as the core alone can have them."""

import random

import pytest

from shared.messages.common import Cancel, Cancelled
from shared.messages.gateway import Namespace
from shared.messages.storage import CommitPages, FindPages, PrefetchPages, ReleasePages
from shared.messages.worker import LoadPages, RunStep, WritePages
from shared.packed import pack, unpack
from tests.conformance.harness import Harness

A = list(range(1, 9))
PROMPT = [*A, 9]


def _on_host_only(core: Harness) -> None:
    core.compute(PROMPT)
    core.evict_device(4)


@pytest.mark.parametrize("moment", ["before found", "after found", "after fetch"])
def test_sc_05_an_abort_round_a_lookup_leaves_no_pin(moment: str) -> None:
    core = Harness()
    core.submit(range(20, 30))  # keeps the step busy
    request = core.submit(PROMPT)
    core.found(0)
    if moment != "before found":
        core.found(4)
    if moment == "after fetch":
        core.prefetch_done(0, 1, 2, 3)
    core.abort(request)
    core.settle()
    core.nothing_left()


def test_sc_06_a_queued_request_that_ends_while_its_prefetch_runs_gives_its_share_back() -> None:
    core = Harness()
    request = core.submit(PROMPT)
    core.found(4)
    assert core.pool.prefetching == 4
    core.abort(request)
    assert core.pending(Cancel)
    prefetch = core.take(PrefetchPages)
    core.answer(core.storage, Cancelled(prefetch.op_id, 0, b""))
    assert core.pool.prefetching == 0
    core.nothing_left()


def test_sc_07_a_hundred_prefetches_half_of_them_revoked() -> None:
    core, rng = Harness(host=40, max_queued=500), random.Random(7)
    requests = [core.submit([*rng.choices(range(1, 40), k=9)], timeout_s=1e6) for _ in range(100)]
    for request in rng.sample(requests, 50):
        core.abort(request)
    while core.pending(FindPages):
        core.found(4)
        while core.pending(PrefetchPages):
            core.prefetch_done(*range(rng.randint(0, 4)))
    core.settle()
    core.nothing_left()
    request = core.submit(range(50, 60))
    core.found(4)
    core.settle(PrefetchPages)
    assert core.pending(PrefetchPages), f"{request} finds the limit open again"


def test_sc_09_random_traffic_keeps_the_sum() -> None:
    core, rng = Harness(device=9, host=14, token_budget=3), random.Random(9)
    for _ in range(120):
        prompt = [rng.randint(1, 2) for _ in range(rng.randint(1, 11))]
        request = core.submit(prompt, max_tokens=rng.randint(1, 4))
        if rng.random() < 0.3:
            core.abort(request)
        if rng.random() < 0.7:
            core.settle()
    core.settle()
    core.nothing_left()


def test_sc_10_a_lookup_hit_that_is_on_the_device_meanwhile_drops_its_pins() -> None:
    core = Harness()
    core.submit(PROMPT)
    core.submit([*A, 10])
    core.found(4)
    core.wait(2.5)  # both go on without it
    core.settle(PrefetchPages, Cancel)
    core.prefetch_done(0, 1, 2, 3)  # the pages are on the device and backed up already
    core.settle()
    core.nothing_left()
    assert core.pool.available == core.pool.total - sum(node.pages for node in core.nodes())


def test_sc_14_a_chain_on_the_host_that_loses_its_end_is_used_up_to_there() -> None:
    core = Harness(prefetch=False)
    _on_host_only(core)
    core.match(A[:4])
    upper, lower = core.nodes()
    removed = core.core.state.tree.detach(lower)
    core.core.host.release(removed.host)
    request = core.submit(PROMPT)
    assert len(unpack(core.pending(LoadPages)[0].host_pages)) == 2
    core.settle()
    assert core.ended[request].usage.host_hit_tokens == 4
    core.evict_device(1)
    assert upper in core.nodes()
    core.nothing_left()


def test_sc_15_a_split_before_committed_completes_both_parts() -> None:
    core = Harness(prefetch=False)
    core.submit(PROMPT)
    core.step_done()
    core.write_done()
    core.match([1, 2, 3, 4, 60, 61])
    core.committed()
    assert [node.host is not None for node in core.nodes()] == [True, True]
    core.settle()
    assert core.core.state.counters["archive_ended_pages"] == 4
    core.nothing_left()


def test_sc_17_a_device_page_with_a_copy_in_flight_is_never_free() -> None:
    core = Harness(prefetch=False)
    core.submit(PROMPT)
    core.step_done()
    reading = unpack(core.pending(WritePages)[0].device_pages)
    core.evict_device(12)
    assert not set(reading.tolist()) & set(core.core.state.device.free_pages().tolist())
    core.write_done()
    core.committed()
    core.evict_device(12)
    assert set(reading.tolist()) <= set(core.core.state.device.free_pages().tolist())


def test_sc_18_a_request_retracted_while_its_backup_runs_is_admitted_again() -> None:
    core = Harness(prefetch=False, device=7)
    core.submit(range(1, 6), max_tokens=6)
    second = core.submit(range(20, 24), max_tokens=4)
    core.settle(WritePages)
    assert core.ended.keys() == {"r1", second}
    assert core.core.state.counters["retracted"] == 1
    core.settle()
    core.nothing_left()


def test_sc_21_namespaces_share_no_page_in_any_tier() -> None:
    core = Harness(load_back_threshold=0)
    names = [Namespace("a", "bc", ""), Namespace("ab", "c", ""), Namespace("a", "", "bc"), Namespace()]
    digests = set()
    for name in names:
        request = core.submit(PROMPT, namespace=name)
        digests.add(core.found(0).digests)
        core.settle()
        usage = core.ended[request].usage
        assert (usage.device_hit_tokens, usage.host_hit_tokens, usage.storage_hit_tokens) == (0, 0, 0)
    assert len(digests) == len(names)  # nor do they meet in L3
    core.evict_device(2)
    assert [core.match(A, name).host_pages + core.match(A, name).device_pages for name in names] == [4] * len(names)


def test_sc_25_of_many_queued_requests_the_one_whose_fetch_ends_first_goes_first() -> None:
    core = Harness(host=96)
    for start in range(5):
        core.submit([start + 1, *range(10, 18)])
    for _ in range(5):
        core.found(4)
    prefetches = core.pending(PrefetchPages)
    assert len(prefetches) == 5
    core.sent.remove(prefetches[-1])
    core.sent.insert(0, prefetches[-1])
    core.prefetch_done(0, 1, 2, 3)
    (step,) = core.pending(RunStep)
    assert step.items[0].tokens == pack([17])


def test_sc_26_a_storage_that_restarts_between_lookup_and_fetch_costs_a_recompute() -> None:
    core = Harness()
    request = core.submit(PROMPT)
    core.found(4)
    core.restart_storage()
    core.settle(PrefetchPages)
    assert core.ended[request].usage.storage_hit_tokens == 0
    core.nothing_left()
    core.compute([*A, 10])
    assert core.core.state.counters["backup_pages"] >= 4  # the new pool is in use


def test_sc_28_wait_complete_doesn_t_take_an_unanswered_lookup_for_done() -> None:
    core = Harness(prefetch_policy="wait_complete")
    core.submit(PROMPT)
    core.wait(1.0)
    assert not core.pending(RunStep)
    core.found(4)
    assert not core.pending(RunStep)
    core.prefetch_done(0, 1, 2, 3)
    assert core.pending(RunStep)


def test_sc_29_a_prompt_of_four_chunks_is_backed_up_once_and_whole() -> None:
    core = Harness(prefetch=False, token_budget=2)
    core.compute(A)
    assert [node.hit_count for node in core.nodes()] == [1] * len(core.nodes())
    assert all(node.host is not None for node in core.nodes())
    assert core.core.state.counters["backup_pages"] == 4


def test_sc_30_backups_go_on_when_the_host_pool_is_half_the_device_pool() -> None:
    core = Harness(prefetch=False, device=20, host=10, backend=False)
    for start in range(0, 60, 10):
        core.compute(range(start + 1, start + 10))
    assert core.core.state.counters["backup_pages"] == 24
    assert core.core.state.counters["backup_dropped_no_host_page"] == 0
    core.nothing_left()


def test_sc_32_a_restart_s_first_requests_share_their_lookup() -> None:
    core = Harness()
    for last in range(10, 20):
        core.submit([*A, last])
    assert len(core.pending(FindPages)) == 1


def test_no_release_is_awaited_while_its_pages_are_written() -> None:
    core = Harness(prefetch=False)
    _on_host_only(core)
    core.evict_host(24)
    (release,) = core.pending(ReleasePages)
    core.submit(range(30, 39))
    core.step_done()
    (write,) = core.pending(WritePages)
    assert not set(unpack(write.host_pages).tolist()) & set(unpack(release.pages).tolist())
    assert not core.pending(CommitPages)
    core.settle()
    core.nothing_left()
