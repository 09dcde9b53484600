"""Fenced examples of README.md and docs/, and the commands in them."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


class Example(NamedTuple):
    """A fenced block."""

    page: str
    line: int  # of the page, where the block begins
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def examples(*languages: str) -> list[Example]:
    """All blocks of these languages; of every one when none is given."""
    found = [
        Example(page.name, text.count("\n", 0, match.start()) + 1, match.group(1), match.group(2))
        for page in PAGES
        for text in [page.read_text(encoding="utf-8")]
        for match in FENCE.finditer(text)
    ]
    return [each for each in found if not languages or each.language in languages]


def commands(example: Example) -> Iterator[list[str]]:
    """The commands of a shell example as lists of words. Raises ValueError for one that never ends."""
    pending = ""
    for line in example.text.splitlines(keepends=True):
        pending += line
        try:
            words = shlex.split(pending.replace("\\\n", " "), comments=True)
        except ValueError:  # a quotation goes on
            continue
        if not pending.endswith("\\\n"):
            pending = ""
            if words:
                yield words
    if pending:
        raise ValueError(f"{example}: {pending!r} has no end")


def all_commands(*programs: str) -> list[tuple[Example, list[str]]]:
    """Commands of these programs with the examples they are in; of all when none is given."""
    found = [(example, words) for example in examples("sh") for words in commands(example)]
    return [(example, words) for example, words in found if not programs or Path(words[0]).name in programs]
