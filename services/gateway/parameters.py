"""From a JSON body to a request struct; which of OpenAI's parameters are taken, ignored or refused."""

import re
from typing import Any, TypeVar

import msgspec

from services.gateway.errors import invalid

T = TypeVar("T", bound=msgspec.Struct)

# OpenAI defines these and no answer depends on them.
IGNORED = {
    "metadata": "labels for OpenAI's own records",
    "parallel_tool_calls": "without tools there are no calls",
    "prediction": "a hint that only changes the speed",
    "prompt_cache_key": "a routing hint; every prefix is cached",
    "prompt_cache_retention": "pages stay until their memory is needed",
    "safety_identifier": "for OpenAI's own abuse reports",
    "service_tier": "there is one",
    "user": "for OpenAI's own abuse reports",
}

# OpenAI defines these and kvtide doesn't do what they ask for: only values that ask for nothing are taken.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}


def decode(body: bytes, kind: type[T]) -> T:
    """The request in `body`. Raises ApiError 400 naming the parameter that is unknown, of a wrong type or out of range.

    A parameter that is null counts as not given.
    """
    try:
        data = _whole_numbers(msgspec.json.decode(body))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"the body is not JSON: {error}; send a JSON object", None, "invalid_json") from None
    if not isinstance(data, dict):
        raise invalid('the body must be a JSON object such as {"model": ...}', None, "invalid_json")
    return _convert(_known(data, kind), kind)


def _known(data: dict[str, Any], kind: type[msgspec.Struct]) -> dict[str, Any]:
    known: dict[str, Any] = {}
    for name, value in data.items():
        if value is None:
            continue
        if name in kind.__struct_fields__:
            known[name] = [_given(item) for item in value] if name == "messages" and isinstance(value, list) else value
        elif name in IGNORED:
            continue
        elif name not in NEUTRAL:
            raise invalid(f"unknown parameter {name!r}: remove it", name, "unknown_parameter")
        elif not any(_same(value, neutral) for neutral in NEUTRAL[name]):
            allowed = " or ".join(msgspec.json.encode(neutral).decode() for neutral in NEUTRAL[name])
            raise invalid(f"{name!r} is not supported: remove it or set it to {allowed}", name, "unsupported_parameter")
    return known


def _same(value: Any, neutral: Any) -> bool:
    """As JSON: to Python 0 is False and 1 is True."""
    return type(value) is type(neutral) and bool(value == neutral)


def _given(value: Any) -> Any:
    """A message without its nulls: clients send an answer's message back with all that it could have had."""
    return {name: item for name, item in value.items() if item is not None} if isinstance(value, dict) else value


def _whole_numbers(value: Any) -> Any:
    """To JSON 1.0 is an integer; to Python it isn't."""
    if isinstance(value, list):
        return [_whole_numbers(item) for item in value]
    if isinstance(value, dict):
        return {name: _whole_numbers(item) for name, item in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _convert(data: dict[str, Any], kind: type[T]) -> T:
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        detail, _, where = str(error).partition(" - at `$")
        param = where.strip("`.").removesuffix("[...]") or None
        if missing := re.search(r"(?:required|unknown) field `(\w+)`", detail):
            param = ".".join(filter(None, (param, missing.group(1))))
        raise invalid(f"bad value for {param or 'the body'}: {detail}", param, "invalid_value") from None
