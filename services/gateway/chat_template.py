"""A model's chat template: a Jinja template from its folder, run in a sandbox."""

import datetime
import json
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.gateway.errors import ApiError
from services.gateway.tool_calls import HERMES, LLAMA, MISTRAL, MISTRAL_MARK, Notation
from shared.errors import ModelError


class ChatTemplate:
    """Renders messages as Hugging Face's `apply_chat_template` does, with the answer's opening at the end."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        """`special_tokens`: what a template may name, such as bos_token. Raises ModelError for a broken template."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        self._special_tokens = special_tokens
        try:
            self._template = environment.from_string(source)
            self.takes_tools = "tools" in find_undeclared_variables(environment.parse(source))
        except TemplateError as error:
            raise ModelError(f"the model's chat template is broken: {error}; repair its chat_template") from None

        self.notation = _notation(source) if self.takes_tools else HERMES

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
        """The prompt. Raises ApiError 422 when the template refuses the messages."""
        try:
            return self._template.render(
                messages=messages, tools=tools or None, add_generation_prompt=True, **self._special_tokens
            )
        except (TemplateError, TypeError) as error:
            raise ApiError(
                422, f"the model's chat template refuses these messages: {error}", param="messages", code="template"
            ) from None


def _notation(source: str) -> Notation:
    """How a model whose template takes tools writes its calls."""
    if HERMES.begin in source:
        return HERMES
    return MISTRAL if MISTRAL_MARK in source else LLAMA


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
