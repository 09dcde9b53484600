"""A message whose parts don't fit each other is malformed: it never reaches a handler."""

import math
from typing import Any

import msgspec
import pytest

from shared.errors import ProtocolError
from shared.messages import ToScheduler, common, gateway, storage, worker
from shared.transport import Decoder

SAMPLING = worker.Sampling(0.0, 1.0, 0, 0.0, 0, 0, 0)
GOOD: list[Any] = [
    common.Heartbeat(1.0, {"open": 2.0}),
    common.Cancelled(1, 0, bytes(8)),
    common.OperationFailed(1, 0, "checksum", 3, bytes(4)),
    storage.Inventory(1, bytes(8), bytes(64)),
    storage.Adopted(1, bytes(4)),
    storage.PrefetchProgress(1, bytes(4)),
    storage.PrefetchDone(1, bytes(4), 0, 0.5),
    storage.ArchiveDone(1, bytes(4), 0.5),
    gateway.Submit("r", bytes(8), 4, [], SAMPLING, gateway.Namespace(), 0, 60.0),
]
BAD: list[tuple[Any, dict[str, Any]]] = [
    (GOOD[0], {"interval_s": math.nan}),
    (GOOD[0], {"interval_s": 0.0}),
    (GOOD[0], {"interval_s": 1e9}),
    (GOOD[0], {"stats": {"open": math.inf}}),
    (GOOD[1], {"named": b"123"}),
    (GOOD[2], {"positions": b"12345"}),
    (GOOD[3], {"pages": bytes(12), "digests": bytes(33)}),
    (GOOD[3], {"digests": bytes(32)}),
    (GOOD[4], {"named": b"1"}),
    (GOOD[5], {"named": b"123"}),
    (GOOD[6], {"named": b"123"}),
    (GOOD[7], {"stored": b"123"}),
    (GOOD[8], {"tokens": bytes(7)}),
    (GOOD[8], {"timeout_s": math.nan}),
    (GOOD[8], {"timeout_s": -1.0}),
]
decode = Decoder(ToScheduler)


@pytest.mark.parametrize("message", GOOD, ids=lambda message: type(message).__name__)
def test_a_good_message_survives_the_wire(message: Any) -> None:
    assert decode(msgspec.msgpack.encode(message)) == message


@pytest.mark.parametrize(("message", "changes"), BAD, ids=lambda part: str(part)[:40])
def test_a_message_that_makes_no_sense_is_malformed(message: Any, changes: dict[str, Any]) -> None:
    fields = msgspec.structs.asdict(message) | changes
    wire = msgspec.msgpack.encode([type(message).__name__, *fields.values()])
    with pytest.raises(ProtocolError, match="can't be decoded"):
        decode(wire)
