"""What `kvtide record` is told of live traffic: sizes, times and salted page ids, no token."""

import hashlib
import time
from typing import Any, NamedTuple

from services.scheduler.core.events import PeerKey, Send
from shared.messages.gateway import Finish, Recorded, RecordWanted, Reject, Submit
from shared.page_hash import chain, namespace_seed

ID_BYTES = 8
ID_MASK = 2**63 - 1  # ids stay positive as signed 64-bit integers


class _Open(NamedTuple):
    arrived_ms: int  # since 1970
    submit: Submit


class Recorder:
    """Remembers the requests under way while anyone records; the core's bound on open requests is theirs too."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._salts: dict[PeerKey, bytes] = {}  # of those who record
        self._open: dict[tuple[PeerKey, str], _Open] = {}

    def want(self, peer: PeerKey, message: RecordWanted) -> None:
        """From now on `peer` hears of each request that comes and ends."""
        self._salts[peer] = message.salt

    def leave(self, peer: PeerKey) -> None:
        """The peer is lost."""
        self._salts.pop(peer, None)
        if not self._salts:
            self._open.clear()

    def submitted(self, gateway: PeerKey, message: Any) -> None:
        """Something has come from a gateway."""
        if self._salts and isinstance(message, Submit):
            self._open.setdefault((gateway, message.request_id), _Open(time.time_ns() // 1_000_000, message))

    def ended(self, gateway: PeerKey, message: Any) -> list[Send]:
        """Something goes to a gateway; a request that has run goes to those who record, too."""
        if not self._open or not isinstance(message, Finish | Reject):
            return []
        request = self._open.pop((gateway, message.request_id), None)
        if request is None or isinstance(message, Reject):
            return []
        arrived_ms, submit = request
        names = submit.namespace
        digests = list(
            chain(namespace_seed(names.tenant, names.lora_id, names.extra_key), submit.tokens, self._page_size)
        )
        usage = message.usage
        return [
            Send(
                peer,
                Recorded(
                    arrived_ms, usage.prompt_tokens, usage.completion_tokens, self._page_size, _ids(digests, salt)
                ),
            )
            for peer, salt in self._salts.items()
        ]


def _ids(digests: list[bytes], salt: bytes) -> list[int]:
    return [int.from_bytes(hashlib.sha256(salt + digest).digest()[:ID_BYTES], "little") & ID_MASK for digest in digests]
