"""What goes into the core and what comes out. Everything else on the wire is a message of `shared.messages`."""

from typing import Any, NamedTuple

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


class DeadlineReached(NamedTuple):
    """`next_deadline()` has passed."""


Event = PeerUp | PeerLost | Received | DeadlineReached


class Send(NamedTuple):
    """A command: one message to one process."""

    peer: PeerKey
    message: Message
