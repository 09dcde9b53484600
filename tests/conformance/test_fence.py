"""Lost, restarted and paused processes: what a process may still touch is not free."""

from msgspec.structs import replace

from services.scheduler.core.events import PeerKey, PeerUp
from services.scheduler.core.operations import MAX_SENDS
from services.scheduler.core.settings import TRANSFER_TIMEOUT_S
from shared.messages.common import Cancel, Cancelled, Fence
from shared.messages.storage import (
    CommitPages,
    Holder,
    OpenSegment,
    PeerExited,
    PrefetchPages,
    ReleasePages,
    Superseded,
)
from shared.messages.worker import (
    DropSegment,
    LoadPages,
    MapSegment,
    RunStep,
    SegmentDropped,
    SegmentMapped,
    StepDone,
    WritePages,
)
from shared.packed import unpack
from tests.conformance.harness import SEGMENT, Harness

A = list(range(1, 9))
PROMPT = [*A, 9]


def test_pages_of_a_lost_worker_s_write_are_quarantined_until_it_has_fenced() -> None:
    core = Harness(prefetch=False)
    core.submit(PROMPT)
    core.step_done()
    core.lose(core.worker)
    assert core.pool.available == 20
    core.wait(100.0)
    assert core.pool.available == 20
    core.feed(PeerUp(core.worker, core.worker_hello))
    assert core.pool.available == 20
    core.fenced(core.worker)
    assert core.pool.available == 24


def test_peer_exited_frees_the_host_pages_and_not_those_of_another_segment() -> None:
    core = Harness(prefetch=False)
    core.submit(PROMPT)
    core.step_done()
    core.lose(core.worker)
    core.answer(core.storage, PeerExited("worker-0", core.worker.epoch, SEGMENT - 1))
    assert core.pool.available == 20
    core.answer(core.storage, PeerExited("worker-0", core.worker.epoch, SEGMENT))
    assert core.pool.available == 24


def test_a_worker_that_unmapped_a_segment_on_demand_is_not_taken_for_dead() -> None:
    core = Harness(prefetch=False)
    core.restart_storage()
    core.answer(core.storage, PeerExited("worker-0", core.worker.epoch, SEGMENT))
    request = core.compute(PROMPT)
    assert core.ended[request].reason == "length"


def test_nothing_is_sent_to_a_worker_whose_exit_was_seen() -> None:
    core = Harness(prefetch=False)
    core.answer(core.storage, PeerExited("worker-0", core.worker.epoch, SEGMENT))
    core.submit(PROMPT)
    assert not core.pending(RunStep)
    assert core.pending(Fence)


def test_a_segment_that_a_worker_says_it_lost_is_mapped_again_before_it_is_used() -> None:
    core = Harness(prefetch=False)
    core.feed(PeerUp(core.worker, replace(core.worker_hello, mapped=[])))
    core.fenced(core.worker)
    again = core.take(MapSegment)
    core.compute(PROMPT)
    assert not core.pool.usable
    assert core.core.state.counters["backup_pages"] == 0
    core.answer(core.worker, SegmentMapped(again.op_id, 0))
    core.compute([*A, 10, 11, 12])
    assert core.core.state.counters["backup_pages"] > 0


def test_the_end_of_a_session_told_late_is_not_the_end_of_the_one_after_it() -> None:
    core = Harness(prefetch=False)
    core.feed(PeerUp(core.worker, replace(core.worker_hello, mapped=[])))
    core.fenced(core.worker)
    core.answer(core.worker, SegmentMapped(core.take(MapSegment).op_id, 0, session=2))
    core.submit(PROMPT)
    core.step_done()
    free = core.pool.available
    core.answer(core.storage, PeerExited("worker-0", core.worker.epoch, SEGMENT, session=1))
    assert core.pool.available == free, "the write under way belongs to the new session"
    assert not core.pending(Fence)
    core.answer(core.storage, PeerExited("worker-0", core.worker.epoch, SEGMENT, session=2))
    assert core.pool.available > free
    assert core.pending(Fence)


def test_a_segment_that_a_worker_still_has_is_used_without_being_mapped_again() -> None:
    core = Harness(prefetch=False)
    core.lose(core.worker)
    core.feed(PeerUp(core.worker, core.worker_hello))
    core.fenced(core.worker)
    assert not core.pending(MapSegment)
    assert core.pool.usable


def test_many_hellos_share_one_fence() -> None:
    core = Harness()
    for _ in range(5):
        core.feed(PeerUp(core.worker, core.worker_hello))
    assert len({fence.op_id for fence in core.pending(Fence)}) == 1


def test_no_command_from_before_a_fence_follows_it() -> None:
    core = Harness(credits=1, host=96)
    core.submit(PROMPT)
    core.submit([20, *PROMPT])  # its lookup waits for a credit
    core.feed(PeerUp(core.storage, core.storage_hello))
    fence = core.pending(Fence)[0]
    core.wait(TRANSFER_TIMEOUT_S * (MAX_SENDS + 1))
    late = [message for message in core.sent[core.sent.index(fence) :] if not isinstance(message, Cancel | Fence)]
    assert [message for message in late if getattr(message, "op_id", fence.op_id) < fence.op_id] == []


def test_the_host_pool_of_a_restarted_storage_is_gone_and_the_device_pages_stay() -> None:
    core = Harness(prefetch=False)
    core.compute(PROMPT)
    core.restart_storage()
    assert core.nodes()[0].host is None
    request = core.compute([*A, 10])
    assert core.ended[request].usage.device_hit_tokens == 8
    core.settle()
    core.nothing_left()


def test_a_new_worker_starts_with_an_empty_device_pool_and_uses_the_host_s_pages() -> None:
    core = Harness(prefetch=False)
    core.compute(PROMPT)
    core.restart_worker()
    assert core.core.state.device.available == 12
    request = core.submit([*A, 10])
    assert core.pending(LoadPages)
    core.settle()
    assert core.ended[request].usage.host_hit_tokens == 8
    core.nothing_left()


def test_a_request_in_mid_step_is_computed_again_by_the_new_worker() -> None:
    core = Harness(prefetch=False, max_steps=2)
    request = core.submit(PROMPT, max_tokens=4)
    core.step_done()
    core.restart_worker()
    core.settle()
    assert core.ended[request].usage.completion_tokens == 4
    assert [token for owner, token in core.emitted if owner == request] == [7, 7, 7, 7]
    core.nothing_left()


def test_pages_of_a_running_step_stay_taken_when_the_fence_drops_the_step_behind_it() -> None:
    core = Harness(host=0, max_steps=2)
    core.submit(PROMPT, max_tokens=3)
    running, behind = core.take(RunStep), core.take(RunStep)
    core.lose(core.worker)
    core.feed(PeerUp(core.worker, core.worker_hello))
    free = core.core.state.device.available
    core.answer(core.worker, Cancelled(behind.op_id, 0, b""))
    assert core.core.state.device.available == free
    core.answer(core.worker, StepDone(running.op_id, 0, [], 0.0))
    assert core.core.state.device.available == core.core.state.device.total


def test_after_a_cancelled_step_the_whole_page_list_is_sent_again() -> None:
    core = Harness(prefetch=False)
    request = core.submit(PROMPT, max_tokens=2)
    core.step_done()
    step = core.take(RunStep)
    core.feed(PeerUp(core.worker, core.worker_hello))
    core.answer(core.worker, Cancelled(step.op_id, 0, b""))
    core.fenced(core.worker)
    core.sent = [message for message in core.sent if not isinstance(message, WritePages)]
    (again,) = core.pending(RunStep)
    assert (again.items[0].first_page, len(unpack(again.items[0].pages))) == (0, 5)
    core.settle(MapSegment)
    assert request in core.ended


def test_a_new_scheduler_tells_workers_to_drop_segments_that_it_has_never_heard_of() -> None:
    core = Harness(holders=[Holder("worker-0", 2, 33)])
    drop = core.take(DropSegment)
    assert drop.segment_epoch == 33
    core.answer(core.worker, SegmentDropped(drop.op_id, 0))
    assert not core.pending(DropSegment)


def test_a_segment_with_a_silent_writer_is_not_used_until_it_exits() -> None:
    core = Harness(host=0)
    ghost = PeerKey("worker-9", 1)
    hello = core.storage_hello
    holders = [Holder(ghost.identity, ghost.epoch, SEGMENT)]
    offered = type(hello)(hello.identity, hello.backend, core.old_segment(8), holders, hello.budget, hello.credits)
    core.feed(PeerUp(core.storage, offered))
    core.fenced(core.storage)
    assert not core.pending(ReleasePages)
    assert not core.pending(OpenSegment)
    core.answer(core.storage, PeerExited(ghost.identity, ghost.epoch, SEGMENT))
    assert len(unpack(core.take(ReleasePages).pages)) == 8


def test_a_silent_writer_makes_the_storage_open_a_new_segment_in_the_end() -> None:
    core = Harness(host=0)
    hello = core.storage_hello
    holders = [Holder("worker-9", 1, SEGMENT)]
    offered = type(hello)(hello.identity, hello.backend, core.old_segment(8), holders, hello.budget, hello.credits)
    core.feed(PeerUp(core.storage, offered))
    core.fenced(core.storage)
    core.wait(21.0)
    assert core.take(OpenSegment).fresh


def test_a_refused_segment_is_asked_for_again() -> None:
    core = Harness(host=0)
    core.feed(PeerUp(core.storage, core.storage_hello))
    core.fenced(core.storage)
    for _ in range(3):
        core.refuse(core.storage, core.take(OpenSegment))
        assert not core.pending(OpenSegment)
        core.wait(6.0)
    assert core.pending(OpenSegment)


def test_an_operation_that_never_answers_is_given_up_and_asked_to_end_until_it_does() -> None:
    core = Harness(prefetch=False)
    core.submit(PROMPT)
    core.step_done()
    write = core.take(WritePages)
    core.wait(TRANSFER_TIMEOUT_S * MAX_SENDS + 1)
    assert len(core.pending(WritePages)) == MAX_SENDS - 1
    assert core.pending(Cancel)[0].target == write.op_id
    core.wait(TRANSFER_TIMEOUT_S * 2)
    assert len(core.pending(Cancel)) == 3
    assert core.pool.available == 20
    core.answer(core.worker, Cancelled(write.op_id, 0, b""))
    assert core.pool.available == 24
    core.nothing_left()


def test_a_commit_that_is_lost_is_released_when_it_settles() -> None:
    core = Harness(prefetch=False)
    core.submit(PROMPT)
    core.step_done()
    core.write_done()
    commit = core.take(CommitPages)
    core.lose(core.storage)
    core.feed(PeerUp(core.storage, core.storage_hello))
    core.fenced(core.storage)
    assert core.take(ReleasePages).pages == commit.pages


def test_a_lost_storage_ends_no_request() -> None:
    core = Harness()
    request = core.submit(PROMPT)
    core.found(4)
    assert core.pending(PrefetchPages)
    core.lose(core.storage)
    core.settle(PrefetchPages)
    assert core.ended[request].usage.completion_tokens == 1


def test_a_gateway_that_was_lost_hears_that_its_requests_have_ended() -> None:
    core = Harness()
    request = core.submit(PROMPT)
    core.lose(core.gateway)
    assert core.ended[request].code == 503
    core.settle()
    core.nothing_left()


def test_a_superseded_scheduler_ends_its_requests_and_says_nothing_more() -> None:
    core = Harness(prefetch=False)
    request = core.submit(PROMPT)
    core.sent.clear()
    core.answer(core.storage, Superseded(99))
    assert core.ended[request].code == 503
    assert core.core.superseded
    assert core.core.next_deadline() is None
    core.submit(PROMPT)
    core.lose(core.worker)
    assert core.sent == []
