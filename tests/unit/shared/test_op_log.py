"""A repeated command is answered and not done twice."""

from shared.messages.storage import Released
from shared.op_log import KEPT_RESULTS, OpLog, Seen


def test_a_command_is_new_then_running_then_done() -> None:
    log = OpLog()
    assert log.begin(7) is Seen.NEW
    assert log.begin(7) is Seen.RUNNING
    assert log.running() == [7]
    log.finish(7, Released(7))
    assert log.begin(7) is Seen.DONE
    assert log.result(7) == Released(7)
    assert log.running() == []


def test_what_is_older_than_the_kept_results_is_stale() -> None:
    log = OpLog()
    for op_id in range(1, KEPT_RESULTS + 3):
        assert log.begin(op_id) is Seen.NEW
        log.finish(op_id, Released(op_id))
    assert log.begin(1) is Seen.STALE
    assert log.begin(2) is Seen.STALE
    assert log.begin(3) is Seen.DONE


def test_an_operation_that_still_runs_is_never_forgotten() -> None:
    log = OpLog()
    log.begin(1)
    for op_id in range(2, 2 * KEPT_RESULTS):
        log.begin(op_id)
        log.finish(op_id, Released(op_id))
    assert log.begin(1) is Seen.RUNNING


def test_a_new_scheduler_starts_anew() -> None:
    log = OpLog()
    log.begin(5)
    log.clear()
    assert log.begin(5) is Seen.NEW


def test_a_command_that_a_fence_overtook_is_stale() -> None:
    log = OpLog()
    assert log.begin(3) is Seen.NEW
    log.fence(9)
    assert log.begin(8) is Seen.STALE
    assert log.begin(3) is Seen.RUNNING
    assert log.begin(9) is Seen.NEW
