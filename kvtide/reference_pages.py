"""The generated parts of docs/: message tables and configuration keys, read from the definitions and their comments.

`python -m kvtide.reference_pages` rewrites them; a test compares.
"""

import ast
import inspect
import io
import sys
import textwrap
import tokenize
import types
import typing
from pathlib import Path
from typing import Any

import msgspec

from shared import messages
from shared.config import Config
from shared.messages import common, gateway, pages, storage, worker

DOCS = Path(__file__).parent.parent / "docs"
BEGIN, END = "<!-- generated: {} -->", "<!-- end -->"
LINKS: tuple[tuple[types.ModuleType, str], ...] = (
    (common, "Every link"),
    (gateway, "Gateway"),
    (worker, "GPU worker"),
    (storage, "Storage"),
    (pages, "Pages between worker and storage"),
)


def field_comments(struct: type) -> dict[str, str]:
    """The comment behind each field of a struct: {field: comment}."""
    source = textwrap.dedent(inspect.getsource(struct))
    comments = {
        token.start[0]: token.string.removeprefix("#").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    definition = ast.parse(source).body[0]
    assert isinstance(definition, ast.ClassDef)
    return {
        node.target.id: next((comments[line] for line in _lines(node) if line in comments), "")
        for node in definition.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def _lines(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def structs_of(module: types.ModuleType) -> list[type]:
    """The message structs that a module defines, in order."""
    return [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, common.Message) and value.__module__ == module.__name__
        if value is not common.Message
    ]


def direction(struct: type) -> str:
    """Who sends a message to whom; a struct in no union is a part of others."""
    to = {"gateway": messages.ToGateway, "worker": messages.ToWorker, "storage": messages.ToStorage}
    receivers = [name for name, union in to.items() if struct in typing.get_args(union)]
    from_ = {"gateway": messages.FromGateway, "worker": messages.FromWorker, "storage": messages.FromStorage}
    senders = [name for name, union in from_.items() if struct in typing.get_args(union)]
    ways = [f"scheduler -> {', '.join(receivers)}"] if receivers else []
    ways += [f"{', '.join(senders)} -> scheduler"] if senders else []
    ways += ["worker -> storage"] if struct in typing.get_args(messages.ToPageServer) else []
    ways += ["storage -> worker"] if struct in typing.get_args(messages.ToPageClient) else []
    return "; ".join(ways) or "part of other messages"


def protocol_tables() -> str:
    """One section for each link, one table for each message."""
    lines: list[str] = []
    for module, title in LINKS:
        lines += [f"### {title}", ""]
        for struct in structs_of(module):
            about = inspect.cleandoc(struct.__doc__ or "")
            lines += [f"**{struct.__name__}** ({direction(struct)}). {about}", ""]
            comments = field_comments(struct)
            if comments:
                lines += ["| field | type | meaning |", "| --- | --- | --- |"]
                hints = typing.get_type_hints(struct)
                lines += [f"| `{name}` | `{_type(hints[name])}` | {text} |" for name, text in comments.items()]
                lines.append("")
    return "\n".join(lines).rstrip()


def configuration_tables() -> str:
    """One table for each section of the configuration."""
    lines: list[str] = []
    for section in Config.__struct_fields__:
        struct = type(getattr(Config(), section))
        lines += [f"### [{section}]", "", inspect.cleandoc(struct.__doc__ or ""), ""]
        lines += ["| key | default | meaning |", "| --- | --- | --- |"]
        for name, text in field_comments(struct).items():
            default = msgspec.json.encode(getattr(struct(), name)).decode()
            lines.append(f"| `{name}` | `{default}` | {text}{_choices(struct, name)} |")
        lines.append("")
    return "\n".join(lines).rstrip()


def _choices(struct: type, name: str) -> str:
    hint = typing.get_type_hints(struct)[name]
    values = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()
    return f" ({', '.join(f'`{value}`' for value in values)})" if values else ""


def _type(hint: Any) -> str:
    return (
        (hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint))
        .replace("|", "or")
        .replace("shared.messages.", "")
        .replace("shared.geometry.", "")
    )


GENERATED = {"protocol.md": ("messages", protocol_tables), "operations.md": ("configuration", configuration_tables)}


def render(name: str) -> str:
    """The page `name` with its generated part made anew."""
    label, make = GENERATED[name]
    text = (DOCS / name).read_text(encoding="utf-8")
    before, marker, rest = text.partition(BEGIN.format(label))
    _, end, after = rest.partition(END)
    if not marker or not end:
        raise SystemExit(f"docs/{name} lacks the markers {BEGIN.format(label)} and {END}")
    return f"{before}{marker}\n\n{make()}\n\n{end}{after}"


def main() -> int:
    """Rewrite all pages."""
    for name in GENERATED:
        (DOCS / name).write_text(render(name), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
