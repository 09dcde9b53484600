"""ZeroMQ sockets: they live here and nowhere else.

Every message is two frames, an `Envelope` and a body. A message that can't be decoded, has another checksum than its
envelope says, is of another protocol version, or names another epoch than the receiver's is dropped and counted: see
`Counters`. A dropped or lost message leaves a gap in the numbers of its link: see `Numbers`.

With keys (`use_keys`) a TCP socket proves itself and encrypts by CURVE; who has no key of the stack isn't connected.
"""

import asyncio
import contextlib
import ipaddress
import logging
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import google_crc32c
import msgspec
import zmq
import zmq.asyncio
from zmq.utils import z85

from shared.errors import ConfigError, ProtocolError
from shared.keys import Keys, read_keys
from shared.messages.common import PROTOCOL, Envelope, Message

MAX_MESSAGE_BYTES = 64 * 2**20  # a WriteDone for 4,096 pages of an 80-layer model is 2.6 MB; far above any real message
HIGH_WATER_MARK = 10_000  # messages queued to one peer; credits keep the real number below 1,000
EVENT_MARK = 1_000  # KV event batches queued to one subscriber, 1 to 10 KB each; a slower one misses some and can ask
IPC, TCP = "ipc://", "tcp://"
ZAP_ENDPOINT = "inproc://zeromq.zap.01"  # where ZeroMQ asks whether a key may connect (RFC 27)
ZAP_DOMAIN = b"kvtide"  # with a domain ZeroMQ refuses everybody while nobody answers there
LINGER_MS = 500  # what a closing socket waits to hand over its last messages
TCP_KEEPALIVE_IDLE_S = 10  # a connection over which nothing goes is tried after this long,
TCP_KEEPALIVE_INTERVAL_S = 5  # then this often,
TCP_KEEPALIVE_COUNT = 3  # and given up after this many tries without an answer of the other host's kernel
TCP_UNACKED_MS = (
    15_000  # so is one whose bytes aren't acked for so long; ZeroMQ makes a new one, maybe to a new address
)

log = logging.getLogger("kvtide.transport")

_fixed = struct.Struct("<4q")  # of an envelope, for its checksum
_encoder = msgspec.msgpack.Encoder()
_envelopes = msgspec.msgpack.Decoder(Envelope)


class DamagedError(ProtocolError):
    """A message that isn't what was sent."""


class VersionError(ProtocolError):
    """A peer of another version of kvtide."""


class Numbers:
    """The numbers of a link's messages, one way out and one way in.

    ZeroMQ loses what is under way when a connection breaks, and a receiver drops what arrives damaged.
    """

    def __init__(self) -> None:
        self.sent = 0
        self.received = 0

    def next(self) -> int:
        """For a message to send."""
        self.sent += 1
        return self.sent

    def skipped(self, number: int) -> bool:
        """Take the number of a message that has come. True when messages before it haven't."""
        if not number:
            return False
        gap, self.received = number != self.received + 1, number
        return gap


def encode(sender_epoch: int, receiver_epoch: int, message: Message, number: int = 0) -> list[bytes]:
    """The two frames of a message; `number` counts it, see `Numbers`."""
    return seal(sender_epoch, receiver_epoch, _encoder.encode(message), number)


def seal(sender_epoch: int, receiver_epoch: int, body: bytes, number: int = 0) -> list[bytes]:
    """A body behind its envelope."""
    checksum = _checksum(PROTOCOL, sender_epoch, receiver_epoch, number, body)
    return [_encoder.encode(Envelope(PROTOCOL, sender_epoch, receiver_epoch, number, checksum)), body]


def decode_envelope(frame: bytes, body: bytes) -> Envelope:
    """The envelope of a body. Raises DamagedError when the frame is none or the checksum differs, VersionError when
    it is of another protocol version."""
    try:
        envelope = _envelopes.decode(frame)
    except msgspec.DecodeError as error:
        raise DamagedError(f"the first frame is no envelope: {error}") from None
    protocol, sender_epoch, receiver_epoch, number, checksum = msgspec.structs.astuple(envelope)
    try:
        arrived = _checksum(protocol, sender_epoch, receiver_epoch, number, body)
    except struct.error:
        raise DamagedError(f"a number in {envelope} is beyond int64") from None
    if checksum not in (-1, arrived):
        raise DamagedError(f"a message of {len(body)} bytes arrived damaged: its checksum is wrong")
    if protocol != PROTOCOL:
        raise VersionError(
            f"the peer speaks protocol {protocol}, this side {PROTOCOL}: run one version of kvtide on both"
        )
    if checksum == -1:
        raise DamagedError("an envelope without a checksum")
    return envelope


def _checksum(protocol: int, sender_epoch: int, receiver_epoch: int, number: int, body: bytes) -> int:
    head: int = google_crc32c.value(_fixed.pack(protocol, sender_epoch, receiver_epoch, number))
    checksum: int = google_crc32c.extend(head, body)
    return checksum


class Decoder:
    """Decodes the bodies of one direction."""

    def __init__(self, union: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(union)

    def __call__(self, body: bytes) -> Any:
        """Raises ProtocolError when the body is none of the union's messages."""
        try:
            return self._decoder.decode(body)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"a message of {len(body)} bytes can't be decoded: {error}") from None


class Counters(Counter[str]):
    """What a transport dropped, by reason: "malformed", "old_epoch", "unknown_peer", "unreachable"; and how often it
    "missed" some that were lost on the way."""

    def malformed(self, peer: str, error: ProtocolError) -> None:
        """Count one that can't be decoded. The 1st, 2nd, 4th, 8th, ... are worth a line: a peer may send any number."""
        self["malformed"] += 1
        if self["malformed"].bit_count() == 1:
            log.warning("message_dropped peer=%s reason=malformed count=%d detail=%s", peer, self["malformed"], error)

    def missed(self, peer: str) -> None:
        """Count that messages of a link were lost. Lines as above."""
        self["missed"] += 1
        if self["missed"].bit_count() == 1:
            log.warning("messages_missed peer=%s count=%d", peer, self["missed"])


_keys: Keys | None = None


def use_keys(folder: str) -> None:
    """The keys (`run.keys_folder`) of every TCP socket that this process makes from now on; "" = none, in the clear.

    Raises ConfigError for a folder that can't be used.
    """
    global _keys
    _keys = read_keys(Path(folder)) if folder else None


class _KeyCheck:
    """Answers ZeroMQ's question whether a client may connect: it has the key that the stack's peers have."""

    def __init__(self, context: zmq.asyncio.Context, allowed: bytes) -> None:
        self.denied = 0  # connections
        self._allowed = z85.decode(allowed)
        self._socket = context.socket(zmq.REP)
        self._socket.bind(ZAP_ENDPOINT)
        self._task = asyncio.get_running_loop().create_task(self._serve())

    async def _serve(self) -> None:
        while True:
            version, number, _, address, _, _, *credentials = await self._socket.recv_multipart()
            known = credentials == [self._allowed]
            if not known:
                self.denied += 1
                log.log(_once(self.denied), "key_refused address=%s", address.decode("utf-8", "replace"))
            status, text = (b"200", b"") if known else (b"400", b"this key isn't one of the stack")
            await self._socket.send_multipart([version, number, status, text, b"", b""])

    def close(self) -> None:
        self._task.cancel()
        self._socket.close(linger=0)


def _once(count: int) -> int:
    """The level of a line that whoever is outside can have written as often as they like."""
    return logging.WARNING if count == 1 else logging.DEBUG


class _Socket:
    def __init__(self, kind: int) -> None:
        self._key_check: _KeyCheck | None = None  # of a bound tcp:// socket with keys
        self._file: Path | None = None  # of a bound ipc:// socket
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(kind)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        self._socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, TCP_KEEPALIVE_IDLE_S)
        self._socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, TCP_KEEPALIVE_INTERVAL_S)
        self._socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, TCP_KEEPALIVE_COUNT)
        self._socket.setsockopt(zmq.TCP_MAXRT, TCP_UNACKED_MS)

    def _bind(self, endpoint: str, remedy: str) -> None:
        if endpoint.startswith(TCP):
            self._guard(endpoint)
        try:
            self._socket.bind(endpoint)
            if endpoint.startswith(IPC):
                self._file = Path(endpoint.removeprefix(IPC))
                self._inode = self._file.stat().st_ino
        except zmq.ZMQError as error:
            self.close()
            raise ProtocolError(f"can't bind {endpoint}: {error}; {remedy}") from None

    def _guard(self, endpoint: str) -> None:
        if _keys is None:
            if not _loopback(endpoint):
                log.warning("in_the_clear endpoint=%s: see run.keys_folder", endpoint)
            return
        allowed, secret = self._key("peer_public"), self._key("server_secret")
        self._key_check = _KeyCheck(self._context, allowed)
        self._socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, secret)

    def _connect(self, endpoint: str) -> None:
        if _keys is not None and endpoint.startswith(TCP):
            secret = self._key("peer_secret")
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, self._key("server_public"))
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(secret))
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        self._socket.connect(endpoint)

    def _key(self, name: str) -> bytes:
        assert _keys is not None
        try:
            return _keys.need(name)
        except ConfigError:
            self.close()
            raise

    @property
    def denied(self) -> int:
        """Connections refused for their key."""
        return self._key_check.denied if self._key_check else 0

    def _send(self, frames: list[bytes], page: memoryview | None = None) -> bool:
        if page is None:
            sent = self._socket.send_multipart(frames, zmq.NOBLOCK)
        else:
            sent = self._socket.send_multipart([*frames, page], zmq.NOBLOCK, copy=False)
        assert isinstance(sent, asyncio.Future)  # not blocking, so it is done already
        return sent.exception() is None

    async def _receive_page(self, before: int) -> tuple[list[bytes], memoryview | None]:
        """The first `before` frames, and the one after them, if there is one, where ZeroMQ received it."""
        frames = await self._socket.recv_multipart(copy=False)
        page = frames[before].buffer if len(frames) == before + 1 else None
        return [frame.bytes for frame in (frames[:before] if page is not None else frames)], page

    def close(self) -> None:
        """Close; queued messages get LINGER_MS. The file of a bound ipc:// socket goes, unless it is a successor's."""
        if self._key_check:
            self._key_check.close()
        self._socket.close()
        self._context.term()
        if self._file and self._file.exists() and self._file.stat().st_ino == self._inode:
            self._file.unlink()


class Router(_Socket):
    """The scheduler's side: any number of peers, each with an identity."""

    def __init__(self, endpoint: str) -> None:
        """Bind. Raises ProtocolError when the endpoint can't be bound."""
        super().__init__(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._bind(endpoint, "is another scheduler running? choose another endpoint")

    async def receive(self) -> tuple[str, list[bytes]]:
        """The next message: the peer's identity and the frames after it."""
        identity, *frames = await self._socket.recv_multipart()
        return identity.decode("utf-8", "replace"), frames

    async def receive_page(self) -> tuple[str, list[bytes], memoryview | None]:
        """The same; the third frame after the identity, a page's bytes, isn't copied."""
        (identity, *frames), page = await self._receive_page(3)
        return identity.decode("utf-8", "replace"), frames, page

    def send(self, peer: str, frames: list[bytes], page: memoryview | None = None) -> bool:
        """Queue frames to a peer. False when it isn't connected or its queue is full.

        page: one more frame, which isn't copied: its bytes are read when they go out.
        """
        return self._send([peer.encode(), *frames], page)


class Dealer(_Socket):
    """A peer's side: one scheduler."""

    def __init__(self, endpoint: str, identity: str) -> None:
        super().__init__(zmq.DEALER)
        self._socket.setsockopt(zmq.ROUTING_ID, identity.encode())
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing queues while there is no connection
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._connect(endpoint)

    async def receive(self) -> list[bytes]:
        """The frames of the next message."""
        frames: list[bytes] = await self._socket.recv_multipart()
        return frames

    async def receive_page(self) -> tuple[list[bytes], memoryview | None]:
        """The same; a third frame, a page's bytes, isn't copied."""
        return await self._receive_page(2)

    def send(self, frames: list[bytes], page: memoryview | None = None) -> bool:
        """Queue frames. False when there is no connection or the queue is full. page: as `Router.send`."""
        return self._send(frames, page)


class Publisher(_Socket):
    """Any number of subscribers. Nobody waits for them: what doesn't fit into a subscriber's queue isn't sent to it."""

    def __init__(self, endpoint: str) -> None:
        """Bind. Raises ProtocolError when the endpoint can't be bound."""
        super().__init__(zmq.PUB)
        self._socket.setsockopt(zmq.SNDHWM, EVENT_MARK)
        self._bind(endpoint, "another process has it, or its folder is missing: choose another endpoint")

    def send(self, frames: list[bytes]) -> None:
        """Queue frames to each subscriber of the first frame's topic."""
        self._send(frames)


class ReplayRouter(Router):
    """A Router for clients that choose no identity, as REQ sockets do."""

    async def receive_request(self) -> tuple[bytes, list[bytes]]:
        """The next request: who to answer, and the frames."""
        client, *frames = await self._socket.recv_multipart()
        return client, frames

    def answer(self, client: bytes, frames: list[bytes]) -> bool:
        """Queue frames. False when the client has gone or its queue is full."""
        return self._send([client, *frames])


class Subscriber(_Socket):
    """The other end of a Publisher; it connects again by itself."""

    def __init__(self, endpoint: str, topic: str) -> None:
        super().__init__(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self._connect(endpoint)

    async def receive(self) -> list[bytes]:
        """The frames of the next message."""
        frames: list[bytes] = await self._socket.recv_multipart()
        return frames


class ReplayClient(_Socket):
    """Asks a ReplayRouter once, for any number of answers."""

    def __init__(self, endpoint: str, request: list[bytes]) -> None:
        super().__init__(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)  # nobody waits for the answer any more
        self._connect(endpoint)
        self._send(request)

    async def receive(self) -> list[bytes]:
        """The frames of the next answer."""
        frames: list[bytes] = await self._socket.recv_multipart()
        return frames


def _loopback(endpoint: str) -> bool:
    host = endpoint.removeprefix(TCP).rpartition(":")[0].strip("[]")
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
