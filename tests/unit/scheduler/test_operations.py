"""The table of operations: credits, repeats, fences."""

from services.scheduler.core.events import PeerKey, Send
from services.scheduler.core.operations import Archive, Load, Operation, Operations, Release
from services.scheduler.core.settings import ASK_AGAIN_S, MAX_HURRIES, MAX_SENDS, TRANSFER_TIMEOUT_S
from shared.messages.common import Cancel
from shared.messages.storage import ReleasePages

PEER = PeerKey("storage-0", 3)


class Table:
    """Operations with one peer that takes `credits` at once."""

    def __init__(self, credits: int) -> None:
        self.sent: list[Send] = []
        self.failed: list[Operation] = []
        self.operations = Operations(self.sent.append, self.failed.append)
        self.operations.grant(PEER, credits)

    def start(self, kind: type[Operation] = Release) -> Operation:
        operation = kind()
        self.operations.start(operation, ReleasePages(self.operations.new_id(), 1, b""), [PEER])
        return operation

    def ids(self) -> list[int]:
        """op_ids of what was sent since the last call; a Cancel counts with its target, negative."""
        ids = [-m.target if isinstance(m := send.message, Cancel) else m.op_id for send in self.sent]  # type: ignore[attr-defined]
        self.sent.clear()
        return ids

    def wait(self, seconds: float) -> None:
        self.operations.now += seconds
        self.operations.expire()


def test_beyond_its_credits_a_peer_gets_nothing_until_it_answers() -> None:
    table = Table(credits=2)
    for _ in range(4):
        table.start()
    assert table.ids() == [1, 2]
    table.operations.answered(1, PEER)
    assert table.ids() == [3]
    table.operations.answered(1, PEER)  # a second time: nothing
    assert table.ids() == []


def test_loads_take_no_credit_so_that_a_step_never_waits_for_one_that_was_not_sent() -> None:
    table = Table(credits=0)
    load = table.start(Load)
    assert table.ids() == [load.op_id]


def test_a_command_is_repeated_then_given_up_then_asked_to_end() -> None:
    table = Table(credits=1)
    operation = table.start(Archive)
    for _ in range(MAX_SENDS - 1):
        table.wait(TRANSFER_TIMEOUT_S)
    assert table.ids() == [1] * MAX_SENDS
    assert not operation.failed
    for _ in range(2):
        table.wait(TRANSFER_TIMEOUT_S)
    assert operation.failed
    assert table.failed == [operation]
    assert table.ids() == [-1, -1]
    assert table.operations.answered(1, PEER) is operation
    assert table.operations.table == {}


def test_a_lost_peer_is_sent_nothing_and_owes_its_answers() -> None:
    table = Table(credits=1)
    operation = table.start()
    table.ids()
    table.operations.lost(PEER)
    table.operations.fail(operation)
    for _ in range(5):
        table.wait(TRANSFER_TIMEOUT_S)
    assert table.ids() == []
    assert table.operations.of_peer(PEER) == [operation]
    assert table.operations.gone(PEER) == [operation]


def test_what_was_never_sent_can_be_taken_back_at_once() -> None:
    table = Table(credits=1)
    first, second = table.start(), table.start()
    for operation in (first, second):
        table.operations.fail(operation)
    assert not table.operations.withdraw(first)
    assert table.operations.withdraw(second)
    assert list(table.operations.table.values()) == [first]
    table.start()
    assert table.ids() == [first.op_id]  # the second had no credit that could come back


def test_nothing_from_before_a_fence_follows_it() -> None:
    table = Table(credits=1)
    sent, queued = table.start(), table.start()
    table.ids()
    fence_id = table.operations.new_id()
    table.operations.hold(PEER, fence_id)
    table.wait(TRANSFER_TIMEOUT_S)
    table.operations.answered(sent.op_id, PEER)
    assert table.ids() == []
    assert table.operations.gone(PEER, below=fence_id) == [queued]
    table.operations.grant(PEER, 1)
    assert table.ids() == []
    later = table.start()
    assert table.ids() == [later.op_id]


def test_after_a_loss_a_command_is_soon_repeated_and_that_is_none_of_its_sends() -> None:
    table = Table(credits=1)
    sent, queued = table.start(), table.start()
    for _ in range(3 * MAX_SENDS):
        table.operations.hurry(PEER)
        table.operations.hurry(PEER)  # one loss is often noticed on both sides
        table.wait(ASK_AGAIN_S)
    assert table.ids() == [sent.op_id] * (1 + 3 * MAX_SENDS)
    assert not sent.failed
    assert queued.sends == 1
    for _ in range(MAX_SENDS):
        table.wait(TRANSFER_TIMEOUT_S)
    assert sent.failed


def test_a_command_that_is_lost_each_time_is_given_up() -> None:
    table = Table(credits=1)
    operation = table.start()
    for _ in range(MAX_HURRIES + MAX_SENDS):
        table.operations.hurry(PEER)  # its peer can't decode it, say: each time it is missed
        table.wait(TRANSFER_TIMEOUT_S)
    assert operation.failed
    assert len(table.ids()) <= MAX_HURRIES + MAX_SENDS + 1  # the last is a Cancel
