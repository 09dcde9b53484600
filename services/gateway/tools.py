"""Functions that a model may call: how they get into the prompt, and the grammar of calls that it must make."""

import json
from dataclasses import dataclass
from typing import Any

from services.gateway.chat_template import ChatTemplate
from services.gateway.errors import invalid
from services.gateway.grammar import json_grammar, lark_json, lark_text, schema_text
from services.gateway.limits import MAX_TOOL_CALLS
from services.gateway.requests import (
    AssistantMessage,
    ChatMessage,
    ChatRequest,
    DeveloperMessage,
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedTool,
    Tool,
    ToolMessage,
)
from services.gateway.tool_calls import HERMES, Notation

# The prompt for a model whose template knows nothing of tools: the words of Hermes 2 Pro, which Qwen took over.
FALLBACK = """You can call functions. These are their signatures, one JSON object a line, within <tools></tools>:
<tools>
{tools}
</tools>
To call one, answer with a JSON object of its name and arguments within <tool_call></tool_call>:
<tool_call>
{{"name": "name of the function", "arguments": {{"name of an argument": "its value"}}}}
</tool_call>
What it gives back comes within <tool_response></tool_response>."""


@dataclass(frozen=True)
class CallRules:
    """How calls look in an answer."""

    notation: Notation
    names: frozenset[str]


def offered(request: ChatRequest) -> list[Tool]:
    """The tools that the model hears of. Raises ApiError 400 for a choice that names none of them."""
    names = [tool.function.name for tool in request.tools]
    choice = request.tool_choice
    if len(set(names)) != len(names):
        raise invalid("two tools have the same name: rename one", "tools")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise invalid(f"tool_choice names {choice.function.name!r}, which is none of the tools", "tool_choice")
    if choice == "required" and not names:
        raise invalid("tool_choice is required and there are no tools: send some", "tool_choice")
    return [] if choice == "none" else request.tools


def render(messages: list[ChatMessage], tools: list[Tool], template: ChatTemplate) -> str:
    """The prompt, with the tools where the template has a place for them, else in the system message.

    Raises ApiError 400 for a message that makes no sense, 422 when the template refuses.
    """
    for index, message in enumerate(messages):
        if message.content is None and not (isinstance(message, AssistantMessage) and message.tool_calls):
            raise invalid("an assistant's message needs content or tool_calls", f"messages[{index}].content")
    plain = [_plain(message) for message in messages]
    if not template.takes_tools:
        plain = [_spelled_out(message) for message in plain]
        if tools:
            signatures = [json.dumps(_signature(tool), ensure_ascii=False) for tool in tools]
            plain = _with_system(plain, FALLBACK.format(tools="\n".join(signatures)))
        return template.render(plain)
    return template.render(plain, [{"type": "function", "function": _signature(tool)} for tool in tools])


def answer_grammar(request: ChatRequest, tools: list[Tool], notation: Notation) -> tuple[str, str]:
    """The grammar of the answer, "" for any text, and the parameter that asks for it."""
    schema: dict[str, Any] | None = None
    match request.response_format:
        case JsonObjectFormat():
            schema = {"type": "object"}
        case JsonSchemaFormat(json_schema):
            schema = json_schema.schema
    forced = bool(tools) and request.tool_choice != "auto"
    if not forced and schema is None:
        return "", ""
    if not tools:
        assert schema is not None
        return json_grammar(schema), "response_format"
    return _calls_grammar(request, tools, notation, None if forced else schema), "tools"


def _calls_grammar(
    request: ChatRequest, tools: list[Tool], notation: Notation, otherwise: dict[str, Any] | None
) -> str:
    """Calls, or JSON that follows `otherwise`, in Lark."""
    choice = request.tool_choice
    named = choice.function.name if isinstance(choice, NamedTool) else None
    allowed = [tool.function for tool in tools if named in (None, tool.function.name)]
    more = MAX_TOOL_CALLS - 1 if request.parallel_tool_calls and named is None else 0
    begin, end = (f"{notation.begin}\n", f"\n{notation.end}") if notation.begin else ("", "")
    separator = "\n" if notation.begin else ", "
    if not (notation.begin or notation.listed):
        more = 0  # an answer of one object has room for one call
    calls = f"call ({lark_text(separator)} call){{0,{more}}}" if more else "call"
    if notation.listed:
        calls = f'"[" {calls} "]"'
    rules = [f"start: {'calls' if otherwise is None else 'calls | answer'}", f"calls: {calls}"]
    rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(allowed))))
    schemas = []
    for number, function in enumerate(allowed):
        head = f'{begin}{{"name": {json.dumps(function.name)}, "{notation.arguments}": '
        parameters = {"type": "object"} | (function.parameters or {})
        schemas.append(parameters)
        rules.append(f"call_{number}: {lark_text(head)} arguments_{number} {lark_text('}' + end)}")
        rules.append(f"arguments_{number}: {lark_json(parameters, 'tools')}")
    if otherwise is not None:
        schemas.append(otherwise)
        rules.append(f"answer: {lark_json(otherwise, 'response_format')}")
    schema_text({"all": schemas}, "tools")  # the bound holds for all of them together
    return "\n".join(rules)


def _plain(message: ChatMessage) -> dict[str, Any]:
    """As templates expect it. OpenAI's "developer" is what models have learned as "system"."""
    parts = message.content or ""
    plain: dict[str, Any] = {
        "role": "system" if isinstance(message, DeveloperMessage) else message.__struct_config__.tag,
        "content": parts if isinstance(parts, str) else "".join(part.text for part in parts),
    }
    if message.name:
        plain["name"] = message.name
    if isinstance(message, ToolMessage):
        plain["tool_call_id"] = message.tool_call_id
    if isinstance(message, AssistantMessage) and message.tool_calls:
        calls = [(call.id, call.function) for call in message.tool_calls]
        plain["tool_calls"] = [_call(call_id, function.name, function.arguments) for call_id, function in calls]
    return plain


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        raise invalid(f"the arguments of the call {call_id!r} are not JSON", "messages") from None
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": value}}


def _spelled_out(message: dict[str, Any]) -> dict[str, Any]:
    """Calls and results as text, for a template that knows nothing of them."""
    role, content = message["role"], message["content"]
    if role == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = [
        f"{HERMES.begin}\n{json.dumps(call['function'], ensure_ascii=False)}\n{HERMES.end}"
        for call in message.pop("tool_calls", [])
    ]
    return message | {"content": "\n".join(filter(None, [content, *calls]))}


def _with_system(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    first, *others = messages
    if first["role"] == "system":
        return [first | {"content": f"{first['content']}\n\n{text}"}, *others]
    return [{"role": "system", "content": text}, *messages]


def _signature(tool: Tool) -> dict[str, Any]:
    """With the parts that templates read without asking."""
    function = tool.function
    return {
        "name": function.name,
        "description": function.description or "",
        "parameters": function.parameters or {"type": "object", "properties": {}},
    }
