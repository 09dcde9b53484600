"""The bodies of OpenAI's completion requests, and kvtide's extensions to them."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from services.gateway.limits import MAX_CHOICES, MAX_LOGPROBS, MAX_SALT_CHARS, MAX_TOP_LOGPROBS

Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Share = Annotated[float, Meta(ge=0, le=1)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """How a stream is shaped."""

    include_usage: bool = False
    include_obfuscation: bool = False  # taken and ignored: there is none


class GenerateRequest(msgspec.Struct, kw_only=True):
    """What both routes share."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    max_tokens: Positive | None = None
    stop: str | list[str] = msgspec.field(default_factory=list)
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Share | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    # Extensions, named as in other servers of the field.
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None  # 0 and -1 = all
    min_p: Share | None = None
    ignore_eos: bool = False
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] = 0  # larger is more urgent
    cache_salt: Annotated[str, Meta(max_length=MAX_SALT_CHARS)] = ""  # requests share pages only within a salt
    return_token_ids: bool = False


class CompletionRequest(GenerateRequest, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[Any]  # text, token ids, or a list of either
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None


class ContentPart(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a message's content; only text is supported."""

    type: Literal["text"]
    text: str


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ContentPart]
    name: str = ""


class ChatRequest(GenerateRequest, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Positive | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
