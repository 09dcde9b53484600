"""Messages of every link: the greeting, the heartbeat, the fence, and answers about operations."""

import math

import msgspec

INT_BYTES = 4
DIGEST_BYTES = 32
MAX_INTERVAL_S = 60.0  # between heartbeats: a longer one would hide a dead peer

PROTOCOL = 3  # raised by every change that an older peer would misread


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of all messages. Subclasses are tagged with their own name."""


def check_packed(**lists: bytes) -> None:
    """Raises ValueError, which makes a message malformed, unless each is a packed int32 list."""
    for name, data in lists.items():
        if len(data) % INT_BYTES:
            raise ValueError(f"{name} has {len(data)} bytes, not a multiple of {INT_BYTES}")


def check_digests(pages: bytes, digests: bytes) -> None:
    """Raises ValueError unless there is one digest for each packed page."""
    check_packed(pages=pages)
    if len(digests) * INT_BYTES != len(pages) * DIGEST_BYTES:
        raise ValueError(f"{len(digests)} bytes of digests don't name {len(pages) // INT_BYTES} pages")


class Envelope(Message):
    """First frame of every message; a mismatch of version, epoch or checksum drops it."""

    protocol: int  # PROTOCOL of the sender
    sender_epoch: int  # ns since 1970 at the sender's start
    receiver_epoch: int  # epoch of the receiver that the sender means; 0 = not known yet
    number: int = 0  # counts the messages of a link since its last hello, from 1; 0 = not counted
    checksum: int = -1  # CRC32C over the fields before it, as int64, and the body; -1 = a version that had none


class Welcome(Message, tag=True):
    """Scheduler -> peer: the hello is taken; from now on use my epoch."""

    identity: str  # of the scheduler


class Refused(Message, tag=True):
    """Scheduler -> peer: the hello is not taken; the peer exits with `reason`."""

    reason: str  # text for a person
    retry: bool  # False: the peer must exit, True: say hello again later


class HelloWanted(Message, tag=True):
    """Scheduler -> peer: I don't know you, say hello."""


class Missed(Message, tag=True):
    """Either way: a number was skipped, so messages of yours were lost. What still matters of them, say again."""


class Heartbeat(Message, tag=True):
    """Either way, every `interval_s`. Three missed ones mean that the sender is lost."""

    interval_s: float  # seconds until the next one
    stats: dict[str, float]  # name -> value, for status and metrics

    def __post_init__(self) -> None:
        """Only finite numbers, and an interval that makes sense."""
        if not 0 < self.interval_s <= MAX_INTERVAL_S or not all(map(math.isfinite, self.stats.values())):
            raise ValueError(f"a heartbeat's interval is above 0 and up to {MAX_INTERVAL_S} s, its stats are finite")


class Fence(Message, tag=True):
    """Scheduler -> worker, storage: finish or drop every operation before this one, then say Fenced."""

    op_id: int  # rises within the scheduler's epoch


class Fenced(Message, tag=True):
    """Worker, storage -> scheduler: no operation before the fence will touch a page any more."""

    op_id: int  # of the Fence
    rank: int  # TP rank; 0 for a storage


class Cancel(Message, tag=True):
    """Scheduler -> worker, storage: drop an operation if it isn't done. It is answered by its own ack or Cancelled."""

    op_id: int  # of this command
    target: int  # op_id to drop


class Cancelled(Message, tag=True):
    """Worker, storage -> scheduler: the operation ended early and touches no page any more."""

    op_id: int  # of the cancelled operation
    rank: int  # TP rank; 0 for a storage
    named: bytes  # packed int32 positions in the operation's page list that were filled and named (prefetch)

    def __post_init__(self) -> None:
        """A packed list."""
        check_packed(named=self.named)


class OperationFailed(Message, tag=True):
    """Worker, storage -> scheduler: the operation ended and touches no page any more, without doing its work."""

    op_id: int  # of the failed operation
    rank: int  # TP rank; 0 for a storage
    reason: str  # "stale", "checksum", "name", "segment", "full", "error"
    layer: int  # first layer that failed, -1 = none in particular
    positions: bytes  # packed int32 positions in the operation's page list that are bad

    def __post_init__(self) -> None:
        """A packed list."""
        check_packed(positions=self.positions)
