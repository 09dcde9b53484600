"""GET /openapi.json: every route as it is. Requests come from the structs that decode them."""

import typing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from services.gateway import openapi_answers as answers
from services.gateway.admin import ACTIONS, AdminRequest
from services.gateway.errors import json_response
from services.gateway.limits import MAX_CHOICES, MAX_STOP_CHARS, MAX_STOPS
from services.gateway.model import Model
from services.gateway.parameters import IGNORED, NEUTRAL
from services.gateway.requests import ChatMessage, ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

Schema = dict[str, Any]

VERSION = "3.1.0"  # of OpenAPI: the first whose schemas are JSON Schema as msgspec writes it
TEMPLATE = "#/components/schemas/{name}"
GENERATE = (CompletionRequest, ChatRequest)  # take OpenAI's other parameters, too
BODIES = (*GENERATE, TokenizeRequest, DetokenizeRequest, AdminRequest)

ERRORS = {
    "400": "The request can't be served as it is; `param` names what to change.",
    "401": "No API key or a wrong one.",
    "403": "`gateway.admin_keys` is empty.",
    "404": "There is no such model, or no such request is known.",
    "409": "It can't be done; the message says why.",
    "408": "The body took too long to arrive.",
    "413": "The body is too large.",
    "422": "The model's chat template refuses the messages.",
    "429": "Too many requests are open; wait as `Retry-After` says.",
    "503": "A part of the stack is missing or restarting; wait as `Retry-After` says.",
}
ONE_OF = ("prompt", "messages")  # of /tokenize
READING = ("400", "404", "408", "413")


class OpenApi:
    """The page, made once: nothing in it changes while the gateway runs."""

    def __init__(self, model: Model, keys: bool) -> None:
        """keys: whether callers need one."""
        self._page = document(model, keys)

    async def page(self, request: Request) -> Response:
        """The page as JSON."""
        return json_response(self._page)


def document(model: Model, keys: bool) -> Schema:
    """The OpenAPI document."""
    auth = ("401",) if keys else ()
    _, schemas = msgspec.json.schema_components(BODIES, ref_template=TEMPLATE)
    for struct in BODIES:
        _close(schemas[struct.__name__], NEUTRAL if struct in GENERATE else {}, IGNORED if struct in GENERATE else {})
        _models(schemas[struct.__name__], model)
    _prompts(schemas["CompletionRequest"]["properties"], model)
    schemas["DetokenizeRequest"]["properties"]["tokens"] = {"type": "array", "items": _token(model)}
    for message in typing.get_args(ChatMessage):
        _nulls(schemas[message.__name__])
    _text_or_chat(schemas["TokenizeRequest"])
    for name in ("CompletionRequest", "ChatRequest"):
        _stops(schemas[name]["properties"])
    schemas |= answers.SCHEMAS
    generated = (*READING, "422", "429", "503", *auth)
    paths = {
        "/v1/completions": _post("Continue a text.", "CompletionRequest", "Completion", generated, "CompletionChunk"),
        "/v1/chat/completions": _post("Answer a chat.", "ChatRequest", "ChatCompletion", generated, "ChatChunk"),
        "/tokenize": _post("The tokens of a text or a chat.", "TokenizeRequest", "Tokens", (*READING, "422", *auth)),
        "/detokenize": _post("The text of tokens.", "DetokenizeRequest", "Detokenized", (*READING, *auth)),
        "/v1/models": _get("The served model, in a list.", "ModelList", auth),
        "/v1/models/{model}": _get("The served model.", "ModelCard", ("404", *auth), parameter="model"),
        "/kvtide/why/{id}": _get(
            "Where the prompt of one of the last answers came from.", "WhyAnswer", ("404", "503", *auth), parameter="id"
        ),
        "/kvtide/admin/{action}": _admin(),
        "/status": _get("The scheduler's status.", "Status", ("503", *auth)),
        "/openapi.json": _get("This page.", "Status", auth),
        "/health": _get("Is every part ready?", "Health", ()),
        "/metrics": _get("Metrics in Prometheus' text format.", None, ()),
        "/": _get("The dashboard, a page for a browser.", None, (), kind="text/html"),
    }
    health = paths["/health"]["get"]["responses"]
    health["503"] = health["200"] | {"description": "`missing` says what is not ready."}
    page: Schema = {
        "openapi": VERSION,
        "info": {"title": "kvtide", "version": "1", "description": "An OpenAI-compatible API; see docs/api.md."},
        "paths": paths,
        "components": {"schemas": schemas},
    }
    schemes = {"admin_key": {"type": "http", "scheme": "bearer", "description": "One of `gateway.admin_keys`."}}
    if keys:
        schemes["key"] = {"type": "http", "scheme": "bearer", "description": "One of `gateway.api_keys`."}
        for path, route in paths.items():
            if path not in ("/", "/health", "/metrics"):
                next(iter(route.values())).setdefault("security", [{"key": []}])
    page["components"]["securitySchemes"] = schemes
    return page


def _admin() -> Schema:
    route = _post("Change the running stack.", "AdminRequest", "AdminAnswer", (*READING, "401", "403", "409", "503"))
    actions = {"enum": list(ACTIONS)}
    route["post"]["parameters"] = [{"name": "action", "in": "path", "required": True, "schema": actions}]
    route["post"]["requestBody"]["required"] = False  # flush needs none
    route["post"]["security"] = [{"admin_key": []}]
    return route


def _close(schema: Schema, neutral: dict[str, tuple[Any, ...]], ignored: dict[str, str]) -> None:
    """What `parameters.decode` does with OpenAI's other parameters."""
    _nulls(schema)
    properties = schema["properties"]
    for name, values in neutral.items():
        properties.setdefault(name, {"enum": [*values, None], "description": "Taken when it asks for nothing."})
    for name, reason in ignored.items():
        properties.setdefault(name, {"description": f"Taken and ignored: {reason}."})


def _nulls(schema: Schema) -> None:
    """null counts as not given, even for a name that isn't known."""
    for name, about in schema["properties"].items():
        if name not in schema.get("required", []):
            about.pop("default", None)
            schema["properties"][name] = _or_null(about)
    schema["additionalProperties"] = {"type": "null"}


def _or_null(schema: Schema) -> Schema:
    if {"type": "null"} in schema.get("anyOf", []):
        return schema
    return {"anyOf": [schema, {"type": "null"}]}


def _models(schema: Schema, model: Model) -> None:
    may_lack = "model" not in schema.get("required", [])
    schema["properties"]["model"] = {"enum": [model.name, None] if may_lack else [model.name]}


def _token(model: Model) -> Schema:
    return {"type": "integer", "minimum": 0, "maximum": model.vocab_size - 1}


def _prompts(properties: Schema, model: Model) -> None:
    tokens = {"type": "array", "items": _token(model), "minItems": 1}
    text = {"type": "string", "minLength": 1}
    several = {"type": "array", "items": {"anyOf": [text, tokens]}, "minItems": 1, "maxItems": MAX_CHOICES}
    properties["prompt"] = {"anyOf": [text, tokens, several]}


def _text_or_chat(schema: Schema) -> None:
    """/tokenize takes a prompt or messages, not both."""
    properties = schema.pop("properties")
    wanted: Schema = {name: {"type": "string"} if name == "prompt" else properties[name]["anyOf"][0] for name in ONE_OF}
    schema["oneOf"] = [
        {
            "type": "object",
            "properties": properties | {other: {"type": "null"} for other in ONE_OF} | {name: wanted[name]},
            "required": [name],
            "additionalProperties": {"type": "null"},
        }
        for name in ONE_OF
    ]
    del schema["additionalProperties"]


def _stops(properties: Schema) -> None:
    text = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
    properties["stop"] = {"anyOf": [text, {"type": "array", "items": text, "maxItems": MAX_STOPS}, {"type": "null"}]}


def _post(summary: str, body: str, answer: str, errors: tuple[str, ...], chunk: str = "") -> Schema:
    content: Schema = _json(answer)
    if chunk:
        content["text/event-stream"] = {"schema": answers.event(chunk)}
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": _json(body)},
            "responses": {"200": {"description": "The answer.", "content": content}} | _errors(errors),
        }
    }


def _get(
    summary: str, answer: str | None, errors: tuple[str, ...], parameter: str | None = None, kind: str = "text/plain"
) -> Schema:
    content = {kind: {"schema": {"type": "string"}}} if answer is None else _json(answer)
    operation: Schema = {
        "summary": summary,
        "responses": {"200": {"description": "The answer.", "content": content}} | _errors(errors),
    }
    if parameter is not None:
        operation["parameters"] = [
            {"name": parameter, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        ]
    return {"get": operation}


def _errors(statuses: tuple[str, ...]) -> Schema:
    return {status: {"description": ERRORS[status], "content": _json("Error")} for status in sorted(statuses)}


def _json(name: str) -> Schema:
    return {"application/json": {"schema": {"$ref": TEMPLATE.format(name=name)}}}
