"""What goes into the core and what comes out. Everything else on the wire is a message of `shared.messages`."""

from typing import Any, Literal, NamedTuple

from shared.messages.common import Message


class PeerKey(NamedTuple):
    """One process: an identity outlives it, an epoch doesn't."""

    identity: str
    epoch: int


class PeerUp(NamedTuple):
    """A hello was decoded, or a lost peer is heard again."""

    peer: PeerKey
    hello: Any  # WorkerHello | StorageHello | GatewayHello


class PeerLost(NamedTuple):
    """Three heartbeats of the peer are missing. Its process may still run."""

    peer: PeerKey


class Received(NamedTuple):
    """A message of a peer whose hello was taken."""

    peer: PeerKey
    message: Message


class MessagesMissed(NamedTuple):
    """Messages to or from a worker or storage were lost on the way."""

    peer: PeerKey


class DeadlineReached(NamedTuple):
    """`next_deadline()` has passed."""


Event = PeerUp | PeerLost | Received | MessagesMissed | DeadlineReached


Medium = Literal["GPU", "CPU_PINNED", "DISK", "EXTERNAL"]
GPU: Medium = "GPU"
CPU: Medium = "CPU_PINNED"


class BlockStored(NamedTuple):
    """A tier has consecutive pages of one sequence from now on (EVENT-01)."""

    digests: list[bytes]  # 32 bytes a page
    parent: bytes  # digest of the page before; of a first page what stands in for it (its namespace)
    tokens: bytes  # packed int32
    medium: Medium


class BlockRemoved(NamedTuple):
    """A tier hasn't these pages any more."""

    digests: list[bytes]  # 32 bytes a page
    medium: Medium


CacheEvent = BlockStored | BlockRemoved


class Send(NamedTuple):
    """A command: one message to one process."""

    peer: PeerKey
    message: Message
