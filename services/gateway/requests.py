"""The bodies of OpenAI's completion requests, and kvtide's extensions to them."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from services.gateway.limits import (
    MAX_BIASES,
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_SALT_CHARS,
    MAX_TOOLS,
    MAX_TOP_LOGPROBS,
)

Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Biases = Annotated[dict[str, Bias], Meta(max_length=MAX_BIASES)]
FunctionName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """How a stream is shaped."""

    include_usage: bool = False
    include_obfuscation: bool = False  # taken and ignored: there is none
    continuous_usage_stats: bool = False  # vLLM's: with include_usage, the usage so far in every event


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
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Biases = msgspec.field(default_factory=dict)  # token id -> what is added to its logit
    # Extensions, named as in other servers of the field.
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None  # 0 and -1 = all
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None  # 1 = none
    ignore_eos: bool = False
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] = 0  # larger is more urgent
    cache_salt: Annotated[str, Meta(max_length=MAX_SALT_CHARS)] = ""  # requests share pages only within a salt
    return_token_ids: bool = False
    kvtide_explain: bool = False  # say for each token of the prompt which tier had it, or why none


class CompletionRequest(GenerateRequest, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[Any]  # text, token ids, or a list of either
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None


class ContentPart(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a message's content; only text is supported."""

    type: Literal["text"]
    text: str


class FunctionCall(msgspec.Struct, forbid_unknown_fields=True):
    """What an assistant has called."""

    name: FunctionName
    arguments: str  # a JSON object as text


class ToolCall(msgspec.Struct, forbid_unknown_fields=True):
    """A call in an assistant's message."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class Said(msgspec.Struct, tag_field="role", forbid_unknown_fields=True, kw_only=True):
    """A message that is words and nothing else."""

    content: str | list[ContentPart]
    name: str = ""


class SystemMessage(Said, tag="system", kw_only=True):
    """How the model is to behave."""


class DeveloperMessage(Said, tag="developer", kw_only=True):
    """OpenAI's newer name for a system message."""


class UserMessage(Said, tag="user", kw_only=True):
    """What a person said."""


class AssistantMessage(msgspec.Struct, tag_field="role", tag="assistant", forbid_unknown_fields=True, kw_only=True):
    """What the model said or called."""

    content: str | list[ContentPart] | None = None  # may be missing beside calls
    name: str = ""
    tool_calls: list[ToolCall] = msgspec.field(default_factory=list)


class ToolMessage(Said, tag="tool", kw_only=True):
    """What a call gave back."""

    tool_call_id: str


ChatMessage = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


class Function(msgspec.Struct, forbid_unknown_fields=True):
    """What a model may call."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema
    strict: bool | None = None  # taken and ignored: forced calls always follow the schema, free ones never have to


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    """A function, as OpenAI wraps it."""

    function: Function
    type: Literal["function"] = "function"


class FunctionRef(msgspec.Struct, forbid_unknown_fields=True):
    """A function by its name."""

    name: FunctionName


class NamedTool(msgspec.Struct, forbid_unknown_fields=True):
    """The function that must be called."""

    function: FunctionRef
    type: Literal["function"] = "function"


class TextFormat(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """Any text."""


class JsonObjectFormat(msgspec.Struct, tag_field="type", tag="json_object", forbid_unknown_fields=True):
    """A JSON object."""


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True):
    """A schema and its name."""

    schema: dict[str, Any]
    name: FunctionName = "answer"
    description: str | None = None
    strict: bool | None = None  # taken and ignored: the schema always holds


class JsonSchemaFormat(msgspec.Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    """JSON that follows a schema."""

    json_schema: JsonSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class ChatRequest(GenerateRequest, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Positive | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    response_format: ResponseFormat = msgspec.field(default_factory=TextFormat)
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] = msgspec.field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize: of a text, or of a conversation as the chat template renders it."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] = msgspec.field(default_factory=list)
    add_special_tokens: bool = True  # only for `prompt`: a template has them written out
    return_token_strs: bool = False


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None
