"""What a recording is told: the pages that two requests share have equal ids, and only under one salt."""

from services.scheduler.core.events import PeerKey
from services.scheduler.recorder import Recorder
from shared.messages.gateway import Finish, Namespace, Recorded, RecordWanted, Reject, Submit, Usage
from shared.messages.worker import Sampling
from shared.packed import pack

GATEWAY, CLI = PeerKey("gateway", 1), PeerKey("cli", 1)
SAMPLING = Sampling(0.0, 1.0, 0, 0.0, 0, 0, 0)


def _serve(recorder: Recorder, tokens: list[int], tenant: str = "") -> list[Recorded]:
    submit = Submit("r", pack(tokens), 3, [], SAMPLING, Namespace(tenant), 0, 9.0)
    recorder.submitted(GATEWAY, submit)
    sends = recorder.ended(GATEWAY, Finish("r", "length", Usage(len(tokens), 3, 0, 0, 0, 0, 0.0)))
    assert all(send.peer == CLI and isinstance(send.message, Recorded) for send in sends)
    return [send.message for send in sends if isinstance(send.message, Recorded)]


def test_a_recorded_request_has_ids_for_its_whole_pages() -> None:
    recorder = Recorder(2)
    assert _serve(recorder, [1, 2, 3]) == []  # nobody records
    recorder.want(CLI, RecordWanted(b"salt"))
    (first,) = _serve(recorder, [1, 2, 3, 4, 5])
    assert (first.input_tokens, first.output_tokens, first.page_size, len(first.ids)) == (5, 3, 2, 2)
    (second,) = _serve(recorder, [1, 2, 9, 9])
    assert [a == b for a, b in zip(first.ids, second.ids, strict=True)] == [True, False]
    (other,) = _serve(recorder, [1, 2, 3, 4], tenant="x")
    assert not set(other.ids) & set(first.ids)
    recorder.want(CLI, RecordWanted(b"pepper"))
    (salted,) = _serve(recorder, [1, 2, 3, 4])
    assert not set(salted.ids) & set(first.ids)
    assert all(0 <= number < 2**63 for number in [*first.ids, *salted.ids])


def test_a_rejected_request_and_one_after_the_recording_s_end_are_not_told() -> None:
    recorder = Recorder(2)
    recorder.want(CLI, RecordWanted(b"salt"))
    recorder.submitted(GATEWAY, Submit("r", pack([1, 2]), 3, [], SAMPLING, Namespace(), 0, 9.0))
    assert recorder.ended(GATEWAY, Reject("r", 503, "later", True)) == []
    recorder.leave(CLI)
    assert _serve(recorder, [1, 2]) == []
