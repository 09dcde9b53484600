"""Gateway <-> scheduler. The command line's `status` speaks it too."""

import math
from typing import Literal

from shared.messages.common import Message, check_packed
from shared.messages.worker import Sampling

MAX_TTL_S = 7 * 86_400.0  # of a pin: who wants it longer pins again


class GatewayHello(Message, tag=True):
    """Gateway -> scheduler, first message."""

    identity: str  # unique among gateways


class Namespace(Message):
    """What keeps pages of different owners apart."""

    tenant: str = ""  # cache salt
    lora_id: str = ""  # adapter, "" = none
    extra_key: str = ""  # anything else that sets pages apart


class Submit(Message, tag=True):
    """Gateway -> scheduler: a request."""

    request_id: str  # unique within the gateway's epoch
    tokens: bytes  # packed int32
    max_tokens: int  # tokens to generate at most; 0 = as many as context and device pool have room for
    stop_token_ids: list[int]  # generation ends after one of these
    sampling: Sampling  # how every token is chosen
    namespace: Namespace  # of its pages
    priority: int  # larger is more urgent
    timeout_s: float  # seconds until the request is given up

    def __post_init__(self) -> None:
        """Lists that fit."""
        check_packed(tokens=self.tokens)
        if not 0 < self.timeout_s < math.inf:
            raise ValueError(f"timeout_s {self.timeout_s} is not a time; send seconds above 0")


class Abort(Message, tag=True):
    """Gateway -> scheduler: end the request now. Answered by Finish unless it has ended already."""

    request_id: str  # of the Submit


class Emission(Message):
    """New tokens of one request."""

    request_id: str  # of the Submit
    tokens: bytes  # packed int32
    logprobs: bytes  # float32 each, natural log of the raw distribution
    top_ids: list[bytes]  # for each token packed int32 token ids, best first
    top_logprobs: list[bytes]  # for each token float32 natural logs


class EmitTokens(Message, tag=True):
    """Scheduler -> gateway: one step's tokens."""

    emissions: list[Emission]  # one for each request of the step


class Usage(Message):
    """Where a prompt's tokens came from, and how long it waited."""

    prompt_tokens: int  # tokens
    completion_tokens: int  # tokens
    device_hit_tokens: int  # prompt tokens found in device pages
    host_hit_tokens: int  # prompt tokens loaded back from host pages
    storage_hit_tokens: int  # prompt tokens that L3 gave
    retracted: int  # times
    queue_s: float  # seconds from Submit to the first step


class Finish(Message, tag=True):
    """Scheduler -> gateway: the request is done."""

    request_id: str  # of the Submit
    reason: str  # "stop", "length", "abort"
    usage: Usage  # of the whole request


class Reject(Message, tag=True):
    """Scheduler -> gateway: the request ends without an answer."""

    request_id: str  # of the Submit
    code: int  # HTTP status: 400, 429, 503
    message: str  # text for a person, with the remedy
    retry: bool  # the same request may succeed later


class WhyWanted(Message, tag=True):
    """Gateway -> scheduler: where did the prompt tokens of these requests come from?"""

    question: int  # repeated in the answer
    request_ids: list[str]  # of Submits


class Why(Message, tag=True):
    """Scheduler -> gateway: the explanations that are still known."""

    question: int  # of the WhyWanted
    body: bytes  # JSON list, one object for each known request: docs/api.md


AdminAction = Literal["flush", "drain", "undrain", "attach", "detach", "clear", "pin", "unpin"]


class Administer(Message, tag=True):
    """Gateway, command line -> scheduler: change the running stack. Answered by Administered."""

    question: int  # repeated in the answer
    action: AdminAction  # docs/operations.md
    storage: str = ""  # identity of the storage that is meant; "" = every one
    tokens: bytes = b""  # packed int32: the prefix to pin
    namespace: Namespace = Namespace()  # whose
    ttl_s: float = 0.0  # seconds that the pin lasts
    pin: int = 0  # number of the pin to end

    def __post_init__(self) -> None:
        """A packed list, and a time."""
        check_packed(tokens=self.tokens)
        if not 0 <= self.ttl_s <= MAX_TTL_S:
            raise ValueError(f"ttl_s {self.ttl_s} is not within 0 and {MAX_TTL_S:g} s")


class Administered(Message, tag=True):
    """Scheduler -> gateway, command line: what came of it."""

    question: int  # of the Administer
    refusal: str  # why it wasn't done, "" = it was
    figures: dict[str, int]  # name -> pages and other numbers, for a person


class StatusWanted(Message, tag=True):
    """Gateway, command line -> scheduler."""


class Status(Message, tag=True):
    """Scheduler -> gateway, command line."""

    body: bytes  # JSON object: docs/operations.md


class RecordWanted(Message, tag=True):
    """Command line -> scheduler: tell me of each request that comes and ends from now on."""

    salt: bytes  # any; page ids are hashed with it


class Recorded(Message, tag=True):
    """Scheduler -> command line: a request has ended."""

    arrived_ms: int  # ms since 1970
    input_tokens: int  # tokens
    output_tokens: int  # tokens
    page_size: int  # tokens
    ids: list[int]  # of its whole pages: 63 bits of SHA-256 over the salt and the page's digest
