"""`kvtide bench core`'s tiered rows: the peers around our core answer all that it asks, and what is timed uses both
tiers."""

import pytest

from kvtide.bench.core import tiers, workloads
from services.scheduler.core.integrity import check_integrity
from services.scheduler.core.settings import WritePolicy
from shared.errors import IntegrityError

SIZES = {"page_size": 16, "device_tokens": 160, "host_tokens": 480}
POLICIES: list[WritePolicy] = ["write_through", "write_through_selective", "write_back"]


@pytest.mark.parametrize("policy", POLICIES)
def test_prompts_end_and_are_found_again_in_both_tiers(policy: WritePolicy) -> None:
    first, second, third = workloads.leaves(3)  # two of them fit on the device
    user = tiers.TieredCore(policy, **SIZES)
    for prompt in (first, first, second, second, third, third):
        user.serve(prompt)
    assert user.device_hits == 3 * 48  # of a prompt that is cached as a whole, the last page is computed again
    user.serve(first)
    assert (user.device_hits, user.host_hits) == (3 * 48, 48)
    check_integrity(user.core)
    assert not user.core.requests.all
    assert not user.core.state.operations.table
    assert not user.core.state.tree.locks


def test_selective_keeps_no_copy_of_a_prompt_that_came_once() -> None:
    user = tiers.TieredCore("write_through_selective", **SIZES)
    for prompt in workloads.leaves(3):
        user.serve(prompt)
    assert user.core.state.counters["backup_pages"] == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_workload_is_counted_by_tier(policy: WritePolicy) -> None:
    first, second, third = workloads.leaves(3)
    done = tiers.tiered_requests([first, first, second, second, third, third, first], policy, **SIZES)
    assert (done.device_hits, done.host_hits) == (3 * 48, 48)
    assert done.hits(7 * 64) == "device 32%, host 11%"


def test_a_workload_that_needs_one_tier_is_refused() -> None:
    with pytest.raises(IntegrityError, match="write_through: no prompt was found in host pages"):
        tiers.tiered_requests(workloads.leaves(2), "write_through", **SIZES)


def test_a_refused_prompt_is_an_error_with_the_cores_reason() -> None:
    user = tiers.TieredCore("write_through", **SIZES)
    with pytest.raises(IntegrityError, match=r"request 1 was refused: prompt \(4096 tokens\)"):
        user.serve(workloads.one_long(4096)[0])


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_loaded_back_is_what_was_computed(policy: WritePolicy) -> None:
    first, second, third = workloads.leaves(3)
    tiers.check_bytes([first, first, second, second, third, third, first], policy, **SIZES)


def test_a_check_without_a_load_is_refused() -> None:
    with pytest.raises(IntegrityError, match="no prompt was found in host pages"):
        tiers.check_bytes(workloads.leaves(2), "write_through", **SIZES)


def test_other_bytes_in_host_memory_are_seen_at_the_load() -> None:
    first, second, third = workloads.leaves(3)
    user = tiers.TieredCore("write_through", **SIZES, moves=True)
    for prompt in (first, second, third):
        user.serve(prompt)
    assert user.bytes is not None
    user.bytes.host ^= 1
    with pytest.raises(IntegrityError, match="have other bytes than were written"):
        user.serve(first)


def test_a_page_whose_copy_was_lost_is_seen_by_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = workloads.leaves(3)
    monkeypatch.setattr(tiers.PageBytes, "load", lambda *_: None)
    with pytest.raises(IntegrityError, match="other bytes than were computed"):
        tiers.check_bytes([first, second, third, first], "write_through", **SIZES)
