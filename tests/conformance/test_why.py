"""Why a token was computed: each reason in each tier that can have it, and what the memory behind it is bounded by."""

from typing import Any

import pytest

from services.scheduler.core import why
from services.scheduler.core.ghosts import Ghosts
from services.scheduler.core.settings import LOOKUP_TIMEOUT_S, PREFETCH_BASE_S
from shared.messages.gateway import Namespace
from shared.messages.storage import ArchiveDone, ArchivePages, FindPages, PagesDropped, PrefetchDone, PrefetchPages
from shared.packed import pack
from shared.page_hash import chain
from tests.conformance.harness import Harness

A = list(range(1, 9))  # four pages of two tokens
PROMPT = [*A, 9]
OTHER = list(range(40, 49))


def explained(core: Harness, request: str) -> list[dict[str, Any]]:
    """The segments of a request, the partial page at the end apart."""
    (explanation,) = core.core.why.of([request])
    *segments, rest = explanation["segments"]
    assert rest["missed"] == {"all": {"reason": "partial_page"}}
    borders = [(segment["from_token"], segment["to_token"]) for segment in explanation["segments"]]
    assert [first for first, _ in borders] == [0, *(last for _, last in borders[:-1])]
    assert borders[-1][1] == explanation["prompt_tokens"]
    return segments


def tiers(core: Harness, request: str) -> list[tuple[int, str]]:
    """How many tokens came from where, in order."""
    return [(each["to_token"] - each["from_token"], each["tier"]) for each in explained(core, request)]


def reasons(core: Harness, request: str, segment: int = -1) -> dict[str, tuple[str, str]]:
    """Reason and cause by tier."""
    missed = explained(core, request)[segment]["missed"]
    return {tier: (fate["reason"], fate.get("cause", "")) for tier, fate in missed.items()}


def test_why_a_new_prompt_was_never_seen_in_any_tier() -> None:
    core = Harness()
    request = core.compute(PROMPT)
    assert tiers(core, request) == [(8, "computed")]
    assert reasons(core, request) == dict.fromkeys(("device", "host", "storage"), ("never_seen", ""))


def test_why_a_device_hit_has_nothing_to_explain() -> None:
    core = Harness()
    core.compute(PROMPT)
    request = core.compute(PROMPT)
    assert explained(core, request) == [{"from_token": 0, "to_token": 8, "tier": "device", "missed": {}}]


def test_why_evicted_from_the_device_names_the_admission_and_its_request() -> None:
    core = Harness(device=6)
    core.compute(PROMPT)
    core.now += 5.0
    taker = core.compute(OTHER)
    core.now += 2.0
    request = core.compute(PROMPT)
    assert tiers(core, request) == [(8, "host")]
    fate = explained(core, request)[0]["missed"]["device"]
    assert fate == {"reason": "evicted", "cause": "admission", "request_id": taker, "seconds_ago": 2.0}


def test_why_a_request_of_another_namespace_is_not_named() -> None:
    core = Harness(device=6)
    core.compute(PROMPT)
    core.now += 1.0
    core.compute(OTHER, namespace=Namespace("someone else"))
    request = core.compute(PROMPT)
    assert "request_id" not in explained(core, request)[0]["missed"]["device"]


def test_why_evicted_in_write_back_names_the_admission_too() -> None:
    core = Harness(device=6, write_policy="write_back", backend=False)
    core.compute(PROMPT)
    taker = core.compute(OTHER)
    request = core.compute(PROMPT)
    assert tiers(core, request) == [(8, "host")]
    assert explained(core, request)[0]["missed"]["device"]["request_id"] == taker


def test_why_evicted_from_the_host_names_what_it_made_room_for() -> None:
    core = Harness(device=6, host=4, backend=False)
    core.compute(PROMPT)
    core.compute(OTHER)  # its backup takes the host pages of the first
    request = core.compute(PROMPT)
    assert reasons(core, request) == {
        "device": ("evicted", "admission"),
        "host": ("evicted", "write_backup"),
        "storage": ("off", "backend"),
    }
    assert core.core.state.counters["host_evicted_unread_pages"] >= 4


def test_why_evicted_by_l3_and_what_lies_behind_is_not_known() -> None:
    core = Harness()
    core.compute(PROMPT)
    core.evict_device(4)
    core.evict_host(24)
    core.settle()
    request = core.submit(PROMPT)
    core.found(0)  # it had all four
    core.settle()
    assert reasons(core, request, 0)["storage"] == ("evicted", "by_storage")
    assert reasons(core, request, 1)["storage"] == ("behind_gap", "")


def test_why_l3_s_own_word_that_it_has_lost_a_page_counts_unless_the_page_was_bad() -> None:
    core = Harness()
    core.compute(PROMPT)
    core.evict_device(4)
    core.evict_host(24)
    core.settle()
    first, second, *rest = chain(b"", pack(A), 2)
    core.core.state.ghosts.note("storage", [second], "corrupted", "prefetch")
    core.answer(core.storage, PagesDropped(b"".join([first, second, *rest])))
    request = core.compute(PROMPT)
    told = [reasons(core, request, at)["storage"] for at in range(3)]
    assert told == [("evicted", "by_storage"), ("corrupted", "prefetch"), ("evicted", "by_storage")]


@pytest.mark.parametrize("full", ["waiting", "no_host_page"])
def test_why_dropped_from_the_backup_queue(full: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if full == "waiting":
        monkeypatch.setattr("services.scheduler.core.backup.MAX_WAITING_BACKUPS", 0)
    core = Harness(device=6, host=2, backend=False)
    core.compute(PROMPT)  # four pages, the host has two
    core.compute(OTHER)
    request = core.compute(PROMPT)
    assert reasons(core, request)["host"] == ("dropped", full)


def test_why_dropped_from_the_archive_queue() -> None:
    core = Harness(host=8)  # a quarter of it is half of the prompt
    core.compute(PROMPT)
    core.evict_device(4)
    core.evict_host(8)
    core.settle()
    request = core.compute(PROMPT)
    assert reasons(core, request)["storage"] == ("dropped", "archive_queue")


def test_why_dropped_when_l3_did_not_store_it() -> None:
    core = Harness()
    core.submit(PROMPT)
    core.settle(ArchivePages)
    archive = core.take(ArchivePages)
    core.answer(core.storage, ArchiveDone(archive.op_id, b"", 0.0))
    core.evict_device(4)
    core.evict_host(24)
    core.settle()
    request = core.compute(PROMPT)
    assert reasons(core, request)["storage"] == ("dropped", "not_stored")


def test_why_evicted_when_l3_lost_it_before_its_archive_was_answered() -> None:
    core = Harness()
    core.submit(PROMPT)
    core.settle(ArchivePages)
    archive = core.take(ArchivePages)
    core.answer(core.storage, PagesDropped(archive.digests))
    core.answer(core.storage, ArchiveDone(archive.op_id, pack(range(4)), 0.0))
    core.evict_device(4)
    core.evict_host(24)
    core.settle()
    request = core.compute(PROMPT)
    assert reasons(core, request)["storage"] == ("evicted", "by_storage")


def test_why_dropped_for_want_of_room_for_a_prefetch() -> None:
    core = Harness(host=8)  # prefetches may hold two pages of it
    request = core.submit(PROMPT)
    core.found(4)
    core.prefetch_done(0, 1)
    core.settle()
    assert tiers(core, request) == [(4, "storage"), (4, "computed")]
    assert reasons(core, request)["storage"] == ("dropped", "no_room")
    assert reasons(core, request, 0) == {"device": ("never_seen", ""), "host": ("never_seen", "")}


def test_why_dropped_when_the_share_of_prefetches_is_too_small_for_any() -> None:
    core = Harness(host=4, prefetch_threshold=4)  # a quarter is one page, below the threshold
    request = core.submit(PROMPT)
    core.found(4)
    core.settle()
    assert reasons(core, request)["storage"] == ("dropped", "no_room")


def test_why_timed_out_lookup() -> None:
    core = Harness()
    request = core.submit(PROMPT)
    core.wait(LOOKUP_TIMEOUT_S + 0.1)
    core.settle(FindPages)
    assert reasons(core, request)["storage"] == ("timed_out", "lookup")


def test_why_timed_out_prefetch() -> None:
    core = Harness()
    request = core.submit(PROMPT)
    core.found(4)
    core.wait(PREFETCH_BASE_S + 0.1)
    core.settle(PrefetchPages)
    assert reasons(core, request)["storage"] == ("timed_out", "prefetch")
    assert core.core.state.counters["recomputed_storage_tokens"] == 8


def test_why_corrupted_in_host_memory_and_the_usage_agrees() -> None:
    core = Harness(backend=False)
    core.compute(PROMPT)
    core.evict_device(4)
    request = core.submit(PROMPT)
    core.load_failed(2)
    core.settle()
    assert tiers(core, request) == [(4, "host"), (2, "computed"), (2, "computed")]
    assert reasons(core, request, 1)["host"] == ("corrupted", "load_back")
    assert reasons(core, request, 2)["host"] == ("behind_gap", "")
    assert core.ended[request].usage.host_hit_tokens == 4


def test_why_corrupted_in_l3_at_once_and_later() -> None:
    core = Harness(prefetch_policy="wait_complete")
    request = core.submit(PROMPT)
    core.found(4)
    prefetch = core.take(PrefetchPages)
    core.answer(core.storage, PrefetchDone(prefetch.op_id, b"\0\0\0\0", 1, 0.0))
    core.settle()
    assert tiers(core, request) == [(2, "storage"), (2, "computed"), (4, "computed")]
    assert reasons(core, request, 1)["storage"] == ("corrupted", "prefetch")
    assert reasons(core, request, 2)["storage"] == ("behind_gap", "")
    core.evict_device(4)
    core.evict_host(24)
    core.settle(ArchivePages)
    later = core.submit(PROMPT)
    core.found(1)
    core.settle()
    assert reasons(core, later, 0)["storage"] == ("below_threshold", "prefetch_threshold")


def test_why_a_failed_read_of_l3_is_not_called_corrupted() -> None:
    core = Harness(prefetch_policy="wait_complete")
    request = core.submit(PROMPT)
    core.found(4)
    core.prefetch_done()
    core.settle()
    assert reasons(core, request, 0)["storage"] == ("failed", "prefetch")


def test_why_another_namespace_is_told_within_a_tenant_only() -> None:
    core = Harness()
    core.compute(PROMPT, namespace=Namespace("alice", "adapter-1"))
    same = core.compute(PROMPT, namespace=Namespace("alice", "adapter-2"))
    assert reasons(core, same) == {
        "device": ("other_namespace", ""),
        "host": ("other_namespace", ""),
        "storage": ("never_seen", ""),
    }
    for stranger in (Namespace("bob", "adapter-1"), Namespace()):
        other = core.compute(PROMPT, namespace=stranger)
        assert set(reasons(core, other).values()) == {("never_seen", "")}


def test_why_below_the_load_back_threshold() -> None:
    core = Harness(load_back_threshold=100, prefetch=False)
    core.compute(PROMPT)
    core.evict_device(4)
    request = core.compute(PROMPT)
    assert reasons(core, request)["host"] == ("below_threshold", "load_back_threshold")
    assert reasons(core, request)["storage"] == ("off", "prefetch")
    assert core.core.state.counters["recomputed_host_tokens"] == 8
    assert core.core.state.counters["recomputed_device_tokens"] == 8
    assert core.core.state.counters["recomputed_tokens"] == 8


def test_why_below_the_prefetch_threshold() -> None:
    core = Harness(prefetch_threshold=100)
    request = core.compute(PROMPT)
    assert reasons(core, request)["storage"] == ("below_threshold", "prefetch_threshold")


def test_why_what_a_write_policy_passes_over_was_not_admitted() -> None:
    core = Harness(device=6, write_policy="write_through_selective", backend=False)
    core.compute(PROMPT)
    core.compute(OTHER)
    request = core.compute(PROMPT)
    assert reasons(core, request)["host"] == ("not_admitted", "write_policy")
    core.compute(PROMPT)  # its second use
    core.compute(OTHER)
    assert tiers(core, core.compute(PROMPT)) == [(2, "device"), (6, "host")]


def test_why_storage_down_while_it_is_silent() -> None:
    core = Harness()
    core.compute(PROMPT)
    core.evict_device(4)
    core.lose(core.storage)
    request = core.compute(PROMPT)
    assert reasons(core, request)["host"] == ("storage_down", "")
    assert reasons(core, request)["storage"] == ("storage_down", "")


def test_why_storage_down_in_the_middle_of_a_lookup() -> None:
    core = Harness()
    request = core.submit(PROMPT)
    core.lose(core.storage)
    core.settle(FindPages)
    assert reasons(core, request)["storage"] == ("storage_down", "")


def test_why_lost_with_the_storage_s_process() -> None:
    core = Harness(backend=False)
    core.compute(PROMPT)
    core.evict_device(4)
    core.restart_storage()
    request = core.compute(PROMPT)
    assert reasons(core, request)["host"] == ("lost", "storage")


def test_why_lost_with_the_worker_s_process() -> None:
    core = Harness()
    core.compute(PROMPT)
    core.restart_worker()
    request = core.compute(PROMPT)
    assert tiers(core, request) == [(8, "host")]
    assert reasons(core, request)["device"] == ("lost", "gpu_worker")


def test_why_without_lower_tiers_they_are_off() -> None:
    core = Harness(host=0)
    request = core.compute(PROMPT)
    assert reasons(core, request)["host"] == ("off", "")
    assert reasons(core, request)["storage"] == ("off", "host_bytes")


def test_why_l3_is_not_asked_for_what_the_tree_has() -> None:
    core = Harness(load_back_threshold=100)
    core.compute(PROMPT)
    core.evict_device(4)
    request = core.compute(PROMPT)
    assert reasons(core, request)["storage"] == ("not_asked", "")


def test_why_the_last_explanations_are_kept_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(why, "MAX_EXPLANATIONS", 2)
    core = Harness()
    requests = [core.compute(PROMPT) for _ in range(3)]
    assert [each["request_id"] for each in core.core.why.of(requests)] == requests[1:]


def test_why_many_segments_end_in_a_mixed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(why, "MAX_SEGMENTS", 2)
    core = Harness(backend=False)
    core.compute(PROMPT)
    core.evict_device(4)
    request = core.submit(PROMPT)
    core.load_failed(2)
    core.settle()
    assert tiers(core, request) == [(4, "host"), (4, "mixed")]


def test_why_switched_off_nothing_is_kept() -> None:
    core = Harness(device=6, explain=False)
    core.compute(PROMPT)
    core.compute(OTHER)
    request = core.compute(PROMPT)
    assert core.core.why.of([request]) == []
    assert not len(core.core.state.ghosts)


def test_why_ghosts_forget_the_oldest() -> None:
    ghosts = Ghosts(limit=2)
    ghosts.note("host", [b"1", b"2"], "evicted")
    ghosts.note("host", [b"1"], "dropped")
    ghosts.note("host", [b"3"], "evicted")
    assert ghosts.fate("host", b"2") is None
    assert [ghosts.fate("host", digest).reason for digest in (b"1", b"3")] == ["dropped", "evicted"]  # type: ignore[union-attr]
    assert len(ghosts) == 2
