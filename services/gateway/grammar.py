"""Grammars for the worker: from JSON schemas and calls, checked here with the model's own tokens, never there first."""

import asyncio
import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from services.gateway.errors import ApiError, invalid
from services.gateway.limits import MAX_GRAMMARS, MAX_SCHEMA_BYTES, MAX_SCHEMA_DEPTH
from services.gateway.model import Model

# Between JSON's marks: an indentation, but no endless run of spaces, which small models fall into.
WHITESPACE = r"[ \n\t]{0,12}"


class GrammarChecker:
    """Compiles grammars to see whether the worker can. Of each a worker compiles its own copy from the text."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._tokenizer: LLTokenizer | None = None  # made with the first grammar: it takes 0.4 s
        self._known: OrderedDict[str, None] = OrderedDict()  # good ones
        self._compiling = asyncio.Lock()  # one at a time: what is compiled is bounded, how many want it isn't

    async def check(self, grammar: str, param: str) -> None:
        """Raises ApiError 400 naming what is wrong with the schema in `param`."""
        if not self._model.stop_token_ids:
            raise invalid(f"{param} needs a model with an end token: it has none in its generation_config.json", param)
        async with self._compiling:
            if grammar not in self._known:
                if problem := await asyncio.to_thread(self._problem, grammar):
                    raise _refused(param, problem)
                self._known[grammar] = None
            self._known.move_to_end(grammar)
            if len(self._known) > MAX_GRAMMARS:
                self._known.popitem(last=False)

    def _problem(self, grammar: str) -> str:
        if self._tokenizer is None:
            self._tokenizer = _read_tokenizer(self._model.folder / "tokenizer.json", self._model)
        failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, self._tokenizer)
        if failed:
            return " ".join(messages[0].split())
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()
        return "no text satisfies it" if matcher.is_error() or matcher.is_stopped() else ""


def json_grammar(schema: dict[str, Any]) -> str:
    """Text that is JSON and follows the schema. Raises ApiError 400 for a number that is none of 64 bits."""
    text = schema_text(schema, "response_format")
    try:
        return LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": WHITESPACE})
    except ValueError as error:
        raise _refused("response_format", str(error)) from None


def lark_json(schema: dict[str, Any], param: str) -> str:
    """The right side of a Lark rule for JSON that follows the schema."""
    return f"%json {schema_text(schema | {'x-guidance': {'whitespace_pattern': WHITESPACE}}, param)}"


def lark_text(text: str) -> str:
    """A literal in Lark."""
    return json.dumps(text, ensure_ascii=False)


def schema_text(schema: dict[str, Any], param: str) -> str:
    """The schema as JSON. Raises ApiError 400 for one that is too large or too deep."""
    if _depth(schema) > MAX_SCHEMA_DEPTH:
        raise _bad_size(param, f"nested more than {MAX_SCHEMA_DEPTH} deep: flatten it, with $ref for what repeats")
    text = json.dumps(schema, ensure_ascii=False)
    if len(text.encode()) > MAX_SCHEMA_BYTES:
        raise _bad_size(param, f"larger than {MAX_SCHEMA_BYTES} bytes: shorten it")
    return text


def _refused(param: str, problem: str) -> ApiError:
    return invalid(f"the schema in {param} can't be followed: {problem}", param, "invalid_schema")


def _bad_size(param: str, what: str) -> ApiError:
    return invalid(f"the schema in {param} is {what}", param, "invalid_schema")


def _depth(value: Any) -> int:
    """How many brackets stand round the innermost value."""
    depth, level = 0, [value]
    while level := [child for item in level for child in _children(item)]:
        depth += 1
        if depth > MAX_SCHEMA_DEPTH:
            break
    return depth


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _read_tokenizer(file: Path, model: Model) -> LLTokenizer:
    try:
        return LLTokenizer(file.read_text(encoding="utf-8"), n_vocab=model.vocab_size, eos_token=model.stop_token_ids)
    except (OSError, ValueError) as error:
        raise ApiError(
            400,
            f"this model can't be held to a grammar, its tokenizer is of an unknown kind ({error}): ask for plain text",
            param="response_format",
            code="unsupported_parameter",
        ) from None
