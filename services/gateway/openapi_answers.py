"""JSON schemas of what the gateway answers, for /openapi.json."""

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "number"}
COUNT: Schema = {"type": "integer", "minimum": 0}
TOKENS: Schema = {"type": "array", "items": COUNT}


def _object(optional: Schema | None = None, **properties: Schema) -> Schema:
    """An object that has exactly these keys, and perhaps the optional ones."""
    return {
        "type": "object",
        "properties": properties | (optional or {}),
        "required": list(properties),
        "additionalProperties": False,
    }


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _answer(kind: str, choice: str) -> Schema:
    return _object(
        {"prompt_token_ids": _list({"anyOf": [COUNT, TOKENS]})},
        id=TEXT,
        object={"const": kind},
        created=COUNT,
        model=TEXT,
        choices=_list(_ref(choice)),
        usage=_ref("Usage"),
        kvtide=_ref("Extras"),
    )


def _chunk(kind: str, choice: Schema) -> Schema:
    return _object(
        {
            "usage": _nullable(_ref("Usage")),
            "kvtide": _ref("Extras"),
            "prompt_token_ids": _list({"anyOf": [COUNT, TOKENS]}),
        },
        id=TEXT,
        object={"const": kind},
        created=COUNT,
        model=TEXT,
        choices=_list(choice),
    )


def event(chunk: str) -> Schema:
    """One server-sent event of a stream; [DONE] ends a complete answer."""
    content = {"anyOf": [_ref(chunk), _ref("Error")]}
    data = {"anyOf": [{"const": "[DONE]"}, TEXT | {"contentMediaType": "application/json", "contentSchema": content}]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


RAW: Schema = {"token_ids": TOKENS, "token_logprobs": _list(NUMBER)}  # with return_token_ids
SCORED = {"token": TEXT, "logprob": NUMBER, "bytes": _list({"type": "integer", "minimum": 0, "maximum": 255})}

TEXT_LOGPROBS = _nullable(
    _object(
        tokens=_list(TEXT),
        token_logprobs=_list(NUMBER),
        top_logprobs=_list({"type": "object", "additionalProperties": NUMBER}),
        text_offset=_list(COUNT),
    )
)
CHAT_LOGPROBS = _nullable(
    _object(content=_list(_object(**SCORED, top_logprobs=_list(_object(**SCORED)))), refusal={"type": "null"})
)
TEXT_REASONS = ["stop", "length"]
CHAT_REASONS = [*TEXT_REASONS, "tool_calls"]
CALL = {"id": TEXT, "type": {"const": "function"}, "function": _object(name=TEXT, arguments=TEXT)}

SCHEMAS: Schema = {
    "Error": _object(error=_object(message=TEXT, type=TEXT, param=_nullable(TEXT), code=_nullable(TEXT))),
    "Usage": _object(
        {
            "prompt_tokens_details": _object(
                cached_tokens=COUNT, device_tokens=COUNT, host_tokens=COUNT, storage_tokens=COUNT
            )
        },
        prompt_tokens=COUNT,
        completion_tokens=COUNT,
        total_tokens=COUNT,
    ),
    "Extras": _object(
        {"explanation": _nullable(_list(_ref("Explanation")))}, queue_s=_nullable(NUMBER), retracted=COUNT
    ),
    "Explanation": _object(
        choice=COUNT,
        prompt_tokens=COUNT,
        page_size=COUNT,
        recomputed_tokens=_object(device=COUNT, host=COUNT, storage=COUNT, any=COUNT),
        segments=_list(_ref("Segment")),
    ),
    "Segment": _object(
        from_token=COUNT,
        to_token=COUNT,
        tier={"enum": ["device", "host", "storage", "computed", "mixed"]},
        missed={
            "type": "object",
            "propertyNames": {"enum": ["device", "host", "storage", "all"]},
            "additionalProperties": _object(
                {"cause": TEXT, "request_id": TEXT, "seconds_ago": NUMBER}, reason=TEXT, text=TEXT
            ),
        },
    ),
    "AdminAnswer": {"type": "object", "required": ["action", "storage"]},
    "WhyAnswer": _object(id=TEXT, choices=_list(_ref("Explanation"))),
    "CompletionChoice": _object(
        RAW,
        index=COUNT,
        text=TEXT,
        logprobs=TEXT_LOGPROBS,
        finish_reason={"enum": TEXT_REASONS},
    ),
    "Completion": _answer("text_completion", "CompletionChoice"),
    "CompletionChunk": _chunk(
        "text_completion",
        _object(RAW, index=COUNT, text=TEXT, logprobs=TEXT_LOGPROBS, finish_reason={"enum": [*TEXT_REASONS, None]}),
    ),
    "Call": _object(**CALL),
    "ChatChoice": _object(
        RAW,
        index=COUNT,
        message=_object(
            {"tool_calls": _list(_ref("Call"))},
            role={"const": "assistant"},
            content=_nullable(TEXT),
            refusal={"type": "null"},
        ),
        logprobs=CHAT_LOGPROBS,
        finish_reason={"enum": CHAT_REASONS},
    ),
    "ChatCompletion": _answer("chat.completion", "ChatChoice"),
    "ChatChunk": _chunk(
        "chat.completion.chunk",
        _object(
            RAW,
            index=COUNT,
            delta=_object(
                {"role": {"const": "assistant"}, "content": TEXT, "tool_calls": _list(_object(index=COUNT, **CALL))}
            ),
            logprobs=CHAT_LOGPROBS,
            finish_reason={"enum": [*CHAT_REASONS, None]},
        ),
    ),
    "Tokens": _object({"token_strs": _list(TEXT)}, count=COUNT, max_model_len=COUNT, tokens=TOKENS),
    "Detokenized": _object(prompt=TEXT),
    "ModelCard": _object(id=TEXT, object={"const": "model"}, created=COUNT, owned_by=TEXT, max_model_len=COUNT),
    "ModelList": _object(object={"const": "list"}, data=_list(_ref("ModelCard"))),
    "Health": _object(
        status={"enum": ["ok", "unavailable"]},
        missing=_list(TEXT),
        scheduler={"enum": ["up", "down"]},
        peers=_list({"type": "object"}),
        model=TEXT,
    ),
    "Status": {"type": "object"},
}
