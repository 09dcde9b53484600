"""Worker <-> storage: host pages for a worker that can't map the pool.

The storage binds ROUTER, the worker connects DEALER. In the envelopes the segment stands for the storage: its epoch is
the receiver's or sender's. A page's bytes are a third frame of their own, as they lie in the pool.
"""

from shared.messages.common import Message


class Join(Message, tag=True):
    """Worker -> storage, first message: I am going to read and write pages of this segment."""

    identity: str  # of the worker, kept over restarts


class Joined(Message, tag=True):
    """Storage -> worker: ack of Join."""

    window: int  # pages of one put that may be under way
    grant_s: float  # seconds for which a PutProgress allows pages to come, from its sending on
    alive_s: float  # seconds between two messages of the worker; five times that long a silence ends its session
    session: int  # rises within the segment: its end, told late, isn't taken for a later one's


class NotJoined(Message, tag=True):
    """Storage -> worker: I don't know you, or the segment is gone. Nothing of yours will be put any more."""


class Alive(Message, tag=True):
    """Worker -> storage, every `alive_s`."""


class Leave(Message, tag=True):
    """Worker -> storage: I touch no page of this segment any more."""


class PutPages(Message, tag=True):
    """Worker -> storage: I am about to send pages. Answered by PutProgress, or RequestFailed with the pages refused."""

    request: int  # rises within the worker's epoch
    pages: bytes  # packed int32 host pages


class PutPage(Message, tag=True):
    """Worker -> storage: one page; its bytes are the third frame."""

    request: int  # of the PutPages
    grant: int  # of the last PutProgress that has come: void once that is `grant_s` old
    position: int  # in the list of the PutPages
    checksums: bytes  # uint32 CRC32C of each unit


class PutProgress(Message, tag=True):
    """Storage -> worker: how far a put is. All its pages are in place once `placed` is their number."""

    request: int  # of the PutPages
    grant: int  # rises within the request
    placed: int  # pages that were right and lie in the pool now
    allowed: int  # pages that may be sent, counted from the first


class GetPages(Message, tag=True):
    """Worker -> storage: send these pages, if all have these names. Answered by GotPage for each, in order."""

    request: int  # rises within the worker's epoch
    pages: bytes  # packed int32 host pages
    digests: bytes  # 32 bytes a page
    allowed: int  # pages that may be sent, counted from the first


class MorePages(Message, tag=True):
    """Worker -> storage: go on."""

    request: int  # of the GetPages
    allowed: int  # pages that may be sent, counted from the first


class GotPage(Message, tag=True):
    """Storage -> worker: one page; its bytes are the third frame."""

    request: int  # of the GetPages
    position: int  # in the list of the GetPages
    checksums: bytes  # uint32 CRC32C of each unit, from the page's name


class Stop(Message, tag=True):
    """Worker -> storage: end a request. Answered by Stopped whatever became of it."""

    request: int  # of the PutPages or GetPages


class Stopped(Message, tag=True):
    """Storage -> worker: no page of the request will be put or sent any more."""

    request: int  # of the Stop


class RequestFailed(Message, tag=True):
    """Storage -> worker: the request has ended early; no page of it will be put or sent any more."""

    request: int  # of the PutPages or GetPages
    reason: str  # "name", "checksum", "full", "error"
    positions: bytes  # packed int32 positions in the request's list that are bad
