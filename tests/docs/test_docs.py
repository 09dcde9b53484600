"""The documents say what the code says."""

import argparse
import re
from pathlib import Path

import pytest

from kvtide.cli import _parser
from kvtide.reference_pages import GENERATED, LINKS, field_comments, render, structs_of

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("name", GENERATED)
def test_docs_generated_parts_are_those_of_the_definitions(name: str) -> None:
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert page == render(name), f"docs/{name} is out of date: run `make docs`"


def test_docs_every_message_field_has_a_comment() -> None:
    bare = [
        f"{struct.__name__}.{name}"
        for module, _ in LINKS
        for struct in structs_of(module)
        for name, comment in field_comments(struct).items()
        if not comment
    ]
    assert not bare


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_docs_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_docs_name_files_and_make_verbs_that_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    verbs = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for verb in re.findall(r"`make ([a-z-]+)", text):
        assert verb in verbs, f"{page.name} names `make {verb}`"
    for path in re.findall(r"`((?:services|shared|kernels|kvtide|tests|docs)/[\w/.-]*)`", text):
        assert (ROOT / path).exists(), f"{page.name} names {path}"


def test_docs_architecture_names_every_module_of_the_core_once() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    named = sorted(name for row in rows for name in re.findall(r"`(\w+\.py)`", row))
    modules = (ROOT / "services" / "scheduler" / "core").glob("*.py")
    assert named == sorted(path.name for path in modules if path.name != "__init__.py")


def test_docs_readme_names_every_page() -> None:
    linked = set(re.findall(r"\]\((docs/[\w.-]+)\)", PAGES[0].read_text(encoding="utf-8")))
    assert linked >= {f"docs/{page.name}" for page in PAGES[1:]}


def test_docs_operations_names_every_command_and_benchmark() -> None:
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    rows = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| `kvtide ")]
    named = {word for row in rows for word in re.findall(r"[\w-]+", row)}
    assert named >= {name for each in _choices(_parser()) for name in each}


def _choices(parser: argparse.ArgumentParser) -> list[list[str]]:
    """Names of the subcommands of a parser, and of theirs."""
    found: list[list[str]] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found.append(list(action.choices))
            found += [names for each in action.choices.values() for names in _choices(each)]
    return found
