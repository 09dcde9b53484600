"""What a worker is late or wrong with: requests that come before it, and a step answered without its tokens."""

from kvtide.simulation.segment import geometry
from services.scheduler.core.core import Core
from services.scheduler.core.events import DeadlineReached, PeerKey, PeerUp, Received
from services.scheduler.core.integrity import check_integrity
from services.scheduler.core.settings import WORKER_WAIT_S, CoreSettings
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
