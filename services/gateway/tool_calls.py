"""A model's function calls in its text: found while the text grows, and taken out of it."""

import json
import secrets
from dataclasses import dataclass
from typing import Any, NamedTuple

MISTRAL_MARK = "[TOOL_CALLS]"  # a special token, which shows no text, in newer vocabularies; plain text in older ones


@dataclass(frozen=True)
class Notation:
    """How a model writes calls."""

    begin: str  # before each call; "" = an answer that begins with a bracket is a call as a whole
    end: str
    arguments: str  # the key beside "name"
    listed: bool = False  # calls stand in a JSON list


HERMES = Notation("<tool_call>", "</tool_call>", "arguments")  # Hermes, Qwen; also kvtide's own prompt
LLAMA = Notation("", "", "parameters")  # Llama 3
MISTRAL = Notation("", "", "arguments", listed=True)


@dataclass(frozen=True)
class Call:
    """One call."""

    index: int  # in its answer
    id: str
    name: str
    arguments: str  # JSON object as text

    def body(self) -> dict[str, Any]:
        """OpenAI's shape."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class Found(NamedTuple):
    """What came out of more text."""

    text: str  # that belongs to no call
    calls: list[Call]


class CallParser:
    """Takes text in any pieces. What only looks like a call, or calls a function nobody offered, stays text."""

    def __init__(self, notation: Notation, names: frozenset[str]) -> None:
        self._notation = notation
        self._names = names
        self._held = ""  # not yet decided
        self._gap = ""  # space before `begin`, dropped with a call
        self._inside = False  # `_held` began with `begin`, or is a whole answer in brackets
        self._spoken = False  # text was shown
        self.found = 0  # calls so far

    def feed(self, text: str) -> Found:
        """Take more text."""
        self._held += text
        if self._notation.begin:
            return self._tagged()
        return Found("", []) if self._bracketed() else self._show(len(self._held))

    def flush(self) -> Found:
        """At the end of the text: what was held back."""
        held, self._held, self._gap = self._gap + self._held, "", ""
        if self._notation.begin:
            body = held.strip().removeprefix(self._notation.begin) if self._inside else ""
        else:
            body = "" if self._spoken else held.strip().removeprefix(MISTRAL_MARK)
        calls = self._calls(body)
        if calls:
            return Found("", calls)
        return Found("" if self.found and not held.strip() else held, [])

    def _tagged(self) -> Found:
        begin, end = self._notation.begin, self._notation.end
        text = ""
        calls: list[Call] = []
        while True:
            if not self._inside:
                at = self._held.find(begin)
                if at < 0:
                    return Found(text + self._show(len(self._held) - self._undecided()).text, calls)
                before, self._held = self._held[:at], self._held[at:]
                text += before.rstrip()
                self._gap = before[len(before.rstrip()) :]
                self._inside = True
            at = self._held.find(end, len(begin))
            if at < 0:
                return Found(text, calls)
            whole, self._held = self._held[: at + len(end)], self._held[at + len(end) :]
            self._inside = False
            made = self._calls(whole[len(begin) : -len(end)])
            calls += made
            text += "" if made else self._gap + whole
            self._gap = ""

    def _undecided(self) -> int:
        """Characters at the end that may yet turn out to stand before or at the beginning of a call."""
        begin = self._notation.begin
        overlap = next((n for n in range(min(len(begin), len(self._held)), 0, -1) if self._held.endswith(begin[:n])), 0)
        rest = self._held[: len(self._held) - overlap]
        return overlap + len(rest) - len(rest.rstrip())

    def _bracketed(self) -> bool:
        """May the whole answer still be calls?"""
        return not self._spoken and self._held.lstrip()[:1] in ("", "{", "[")

    def _show(self, count: int) -> Found:
        shown, self._held = self._held[:count], self._held[count:]
        self._spoken = self._spoken or bool(shown)
        return Found(shown, [])

    def _calls(self, body: str) -> list[Call]:
        """The calls that `body` is; none unless all of it is calls of known functions."""
        try:
            value = json.loads(body)
        except (ValueError, RecursionError):
            return []
        values = value if isinstance(value, list) else [value]
        calls = [call for n, each in enumerate(values, self.found) if (call := self._call(n, each)) is not None]
        if len(calls) < len(values):
            return []
        self.found += len(calls)
        return calls

    def _call(self, index: int, value: Any) -> Call | None:
        if not isinstance(value, dict) or not isinstance(value.get("name"), str) or value["name"] not in self._names:
            return None
        arguments = value.get("arguments", value.get("parameters"))
        if not isinstance(arguments, dict):
            return None
        return Call(index, f"call_{secrets.token_hex(12)}", value["name"], json.dumps(arguments, ensure_ascii=False))
