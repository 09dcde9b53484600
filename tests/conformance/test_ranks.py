"""Two TP ranks: an operation is done when both have acked, failed when one has."""

from typing import Any

from services.scheduler.core.events import PeerUp
from shared.messages.common import Fence, Fenced, OperationFailed
from shared.messages.storage import CommitPages, FindPages, Found, PrefetchPages
from shared.messages.worker import LoadDone, LoadPages, RunStep, Sampled, StepDone, StepFailed, WriteDone, WritePages
from shared.packed import pack, unpack
from tests.conformance.harness import Harness

A = list(range(1, 9))


class Ranks(Harness):
    """Every command to the workers goes to both; a test answers for each."""

    def __init__(self, **options: Any) -> None:
        super().__init__(ranks=2, **options)

    def both(self, kind: type) -> Any:
        """The oldest command of a kind, which both ranks must have got."""
        first, second = self.take(kind), self.take(kind)
        assert first == second
        return first

    def steps(self, *, fails: int | None = None) -> None:
        """The oldest step ends on both ranks."""
        step = self.both(RunStep)
        for rank, key in enumerate(self.ranks):
            if rank == fails:
                self.answer(key, StepFailed(step.op_id, rank, "error", []))
            else:
                sampled = [Sampled(item.row, 7, -0.1, b"", b"") for item in step.items if item.sampling is not None]
                self.answer(key, StepDone(step.op_id, rank, sampled, 0.0))

    def backed_up(self) -> None:
        """A is on the host."""
        self.submit([*A, 9])
        self.steps()
        write = self.both(WritePages)
        for rank, key in enumerate(self.ranks):
            self.answer(key, WriteDone(write.op_id, rank, b"sum%d" % rank * 4, 0.0))
        self.settle()


def test_sc_01_a_backup_that_one_rank_has_refused_is_none() -> None:
    core = Ranks(prefetch=False)
    core.submit([*A, 9])
    core.steps()
    write = core.both(WritePages)
    core.answer(core.ranks[0], WriteDone(write.op_id, 0, b"sums" * 4, 0.0))
    core.answer(core.ranks[1], OperationFailed(write.op_id, 1, "segment", -1, b""))
    assert not core.pending(CommitPages)
    (node,) = core.nodes()
    assert (node.host, node.writing, node.lock_ref) == (None, None, 0)
    assert core.pool.available == core.pool.total
    core.nothing_left()


def test_sc_01_the_first_rank_s_refusal_waits_for_the_second_s_ack() -> None:
    core = Ranks(prefetch=False)
    core.submit([*A, 9])
    core.steps()
    write = core.both(WritePages)
    core.answer(core.ranks[1], OperationFailed(write.op_id, 1, "segment", -1, b""))
    assert core.pool.available == core.pool.total - 4  # rank 0 may still write
    core.answer(core.ranks[0], WriteDone(write.op_id, 0, b"sums" * 4, 0.0))
    assert core.pool.available == core.pool.total
    core.nothing_left()


def test_sc_02_only_the_storage_ends_a_prefetch_and_both_ranks_load_the_same() -> None:
    core = Ranks()
    core.submit([*A, 9])
    core.answer(core.storage, Found(core.take(FindPages).op_id, 4))
    assert not core.pending(LoadPages)
    core.prefetch_done(0, 1, 2, 3)
    load = core.both(LoadPages)
    assert len(unpack(load.host_pages)) == 4
    assert not core.pending(PrefetchPages)


def test_sc_03_a_page_that_one_rank_lacks_ends_the_prefix_for_all() -> None:
    core = Ranks()
    core.submit([*A, 9])
    core.answer(core.storage, Found(core.take(FindPages).op_id, 4))
    core.prefetch_done(0, 1, 3)  # a host page holds all ranks' parts: page 2 was incomplete
    assert len(unpack(core.both(LoadPages).host_pages)) == 2


def test_sc_04_checksums_are_committed_page_by_page_with_all_ranks_parts_side_by_side() -> None:
    core = Ranks(prefetch=False)
    core.submit([*A, 9])
    core.steps()
    write = core.both(WritePages)
    core.answer(core.ranks[1], WriteDone(write.op_id, 1, b"b0..b1..b2..b3..", 0.0))
    assert not core.pending(CommitPages)
    core.answer(core.ranks[0], WriteDone(write.op_id, 0, b"a0..a1..a2..a3..", 0.0))
    assert core.take(CommitPages).checksums == b"a0..b0..a1..b1..a2..b2..a3..b3.."


def test_a_load_that_one_rank_fails_is_failed_when_both_have_answered() -> None:
    core = Ranks(prefetch=False)
    core.backed_up()
    core.evict_device(4)
    core.submit([*A, 9])
    load = core.both(LoadPages)
    core.answer(core.ranks[1], OperationFailed(load.op_id, 1, "checksum", 0, pack([1])))
    assert core.match(A).host_pages == 1
    assert core.pool.pins.any()  # rank 0 may still read
    core.answer(core.ranks[0], LoadDone(load.op_id, 0, 0.0))
    assert not core.pool.pins.any()


def test_a_step_that_one_rank_fails_is_computed_again() -> None:
    core = Ranks(prefetch=False)
    request = core.submit([*A, 9])
    core.steps(fails=1)
    assert request not in core.ended
    core.steps()
    assert core.ended[request].usage.completion_tokens == 1


def test_when_a_rank_is_replaced_the_other_one_fences_before_a_page_is_given_again() -> None:
    core = Ranks(prefetch=False, host=0)
    core.submit([*A, 9])
    core.both(RunStep)  # rank 0 still computes it
    core.ranks[1] = core.ranks[1]._replace(epoch=99)
    core.feed(PeerUp(core.ranks[1], core.hellos[1]))
    fences = core.pending(Fence)
    assert len(fences) == 2
    core.sent.clear()
    for fence in fences:
        assert not core.pending(RunStep)
        for rank, key in enumerate(core.ranks):
            core.answer(key, Fenced(fence.op_id, rank))
    assert len(core.pending(RunStep)) == 2


def test_a_load_that_only_the_remaining_rank_owes_ends_with_the_replaced_one() -> None:
    core = Ranks(prefetch=False)
    core.backed_up()
    core.evict_device(4)
    core.submit([*A, 9])
    load = core.both(LoadPages)
    core.answer(core.ranks[1], LoadDone(load.op_id, 1, 0.0))
    core.ranks[1] = core.ranks[1]._replace(epoch=99)
    core.feed(PeerUp(core.ranks[1], core.hellos[1]))
    assert [node.loading for node in core.nodes()] == [None] * len(core.nodes())
    assert core.match(A).host_pages + core.match(A).device_pages in (0, 4)


def test_a_step_in_doubt_that_one_rank_still_owes_is_not_built_on() -> None:
    core = Ranks(prefetch=False, max_steps=2)
    core.submit([1, 2, 3], max_tokens=1)
    owed = core.both(RunStep)
    core.feed(PeerUp(core.ranks[1], core.hellos[1]))
    core.answer(core.ranks[1], Fenced(core.take(Fence).op_id, 1))
    again = core.both(RunStep)
    assert (again.items[0].tokens, again.after) == (owed.items[0].tokens, 0)
