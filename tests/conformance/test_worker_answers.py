"""What a worker is late or wrong with: requests before it, steps without their tokens, steps that it has missed."""

from kvtide.simulation.segment import geometry
from services.scheduler.core.core import Core
from services.scheduler.core.events import DeadlineReached, PeerKey, PeerUp, Received
from services.scheduler.core.integrity import check_integrity
from services.scheduler.core.settings import ASK_AGAIN_S, WORKER_WAIT_S, CoreSettings
from shared.messages import common, gateway, worker
from shared.packed import pack
from tests.conformance.harness import GREEDY, Harness


def test_a_request_that_comes_before_any_worker_waits_for_it() -> None:
    core = Core(CoreSettings(host_tier=False))
    peer = PeerKey("gateway-0", 1)
    core.handle(PeerUp(peer, gateway.GatewayHello("gateway-0")), 0.0)
    submit = gateway.Submit("r", pack([1, 2, 3]), 2, [], GREEDY, gateway.Namespace(), 0, 600.0)
    assert core.handle(Received(peer, submit), 1.0) == []
    assert core.next_deadline() == 1.0 + WORKER_WAIT_S
    [refusal] = core.handle(DeadlineReached(), 1.0 + WORKER_WAIT_S)
    assert isinstance(refusal.message, gateway.Reject)
    assert (refusal.message.code, refusal.message.retry) == (503, True)
    core.handle(Received(peer, submit), 40.0)
    hello = worker.WorkerHello("worker-0", 0, geometry(64, 0, 1), b"m" * 32, 9, 8, 512, 1, 32, [])
    commands = core.handle(PeerUp(PeerKey("worker-0", 2), hello), 41.0)
    [fence] = [command.message for command in commands if isinstance(command.message, common.Fence)]
    commands = core.handle(Received(PeerKey("worker-0", 2), common.Fenced(fence.op_id, 0)), 42.0)
    assert [type(command.message) for command in commands] == [worker.RunStep]
    check_integrity(core)


def test_a_step_answered_without_its_tokens_is_computed_again() -> None:
    core = Harness(prefetch=False)
    core.submit([1, 2, 3])
    step = core.take(worker.RunStep)
    core.answer(core.worker, worker.StepDone(step.op_id, 0, [], 0.1))
    assert core.emitted == []
    again = core.step_done()
    assert again.items[0].tokens == step.items[0].tokens
    core.settle()
    core.nothing_left()


def test_a_step_names_the_one_in_flight_that_it_builds_on() -> None:
    core = Harness(prefetch=False, max_steps=2)
    core.submit([1], max_tokens=3)
    first, second = core.pending(worker.RunStep)
    assert (first.after, second.after) == (0, first.op_id)
    core.step_done()
    (third,) = [step for step in core.pending(worker.RunStep) if step is not second]
    assert third.after == second.op_id


def test_after_a_missed_step_none_follows_until_it_is_answered() -> None:
    core = Harness(prefetch=False, max_steps=2)
    request = core.submit([1, 2, 3], max_tokens=3)
    lost, ahead = core.pending(worker.RunStep)
    core.answer(core.worker, worker.StepFailed(ahead.op_id, 0, "order", []))
    core.sent.remove(ahead)
    other = core.submit([20, 21, 22], max_tokens=1)
    assert core.pending(worker.RunStep) == [lost]
    assert core.core.next_deadline() <= core.now + ASK_AGAIN_S
    core.step_done()  # it had to be sent again
    core.settle()
    assert [core.ended[each].usage.completion_tokens for each in (request, other)] == [3, 1]
    assert core.core.state.counters["step_failed_order"] == 1
    core.nothing_left()


def test_what_a_step_behind_a_failed_one_computes_joins_no_tree() -> None:
    core = Harness(prefetch=False, max_steps=2)
    request = core.submit([1, 2, 3], max_tokens=9)
    for _ in range(3):
        core.step_done()
    core.abort(request)
    core.step_failed()  # the sixth token's
    core.step_done()
    assert core.match([1, 2, 3, 7, 7, 7]).device_pages == 2  # as before
    core.settle()
    core.nothing_left()


def test_the_chunks_of_a_prompt_join_the_tree_one_by_one_beside_steps_ahead() -> None:
    core = Harness(prefetch=False, max_steps=2, token_budget=4)
    prompt = list(range(1, 13))
    core.submit([*prompt, 99], max_tokens=4)
    for pages in (2, 4, 6):
        assert len(core.pending(worker.RunStep)) == 1
        core.step_done()
        assert core.match(prompt).device_pages == pages
    core.settle()
    core.nothing_left()


def test_a_prompt_computed_at_once_joins_the_tree_before_the_request_ends() -> None:
    core = Harness(prefetch=False, max_steps=2)
    prompt = list(range(1, 9))
    core.submit([*prompt, 99], max_tokens=9)
    for _ in range(3):
        core.step_done()
    assert core.match(prompt).device_pages == 4
    assert len(core.pending(worker.RunStep)) == 2  # and steps run ahead again
    core.settle()
    core.nothing_left()


def test_a_request_that_runs_ahead_gives_its_pages_to_an_older_one_at_once() -> None:
    core = Harness(prefetch=False, host=0, page_size=8, device=2, max_steps=2)
    older, younger = core.submit(list(range(1, 6)), max_tokens=8), core.submit([20], max_tokens=7)
    while older not in core.ended:
        core.step_done()
    assert younger not in core.ended
    core.settle()
    assert [core.ended[each].usage.completion_tokens for each in (older, younger)] == [8, 7]
    assert core.core.state.counters["retracted"] == 1
    core.nothing_left()
