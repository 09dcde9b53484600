"""docs/failures.md names constants with their values, settings with their defaults, and tests that exist."""

import ast
import re
from pathlib import Path

from shared.config import Config

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "failures.md").read_text(encoding="utf-8")
QUOTED = re.compile(r"`([\w.]+)`\s+\(([\d.,]+)(?: s| ms)?\)")
SOURCES = [path for folder in ("services", "shared", "kvtide") for path in sorted((ROOT / folder).rglob("*.py"))]
ENOUGH = 20  # constants that the page quotes at least: more have been lost from it by mistake


def constants(path: Path) -> dict[str, float]:
    """Numbers that a module names, by name."""
    found: dict[str, float] = {}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            names = [node.target.id]
        else:
            continue
        if (value := number(node.value, found)) is not None:
            found |= dict.fromkeys(names, value)
    return found


def number(node: ast.expr | None, known: dict[str, float]) -> float | None:
    """The value of a number, of one that the module has named, or of a product of both."""
    match node:
        case ast.Constant(int() | float() as value):
            return float(value)
        case ast.Name(name):
            return known.get(name)
        case ast.BinOp(left, ast.Mult(), right):
            factors = number(left, known), number(right, known)
            return None if factors[0] is None or factors[1] is None else factors[0] * factors[1]
    return None


def test_the_page_quotes_the_values_of_the_code() -> None:
    known: dict[str, set[float]] = {}
    for name, value in (item for path in SOURCES for item in constants(path).items()):
        known.setdefault(name, set()).add(value)
    quoted = QUOTED.findall(PAGE)
    for name, text in quoted:
        section, _, key = name.partition(".")
        values = {getattr(getattr(Config(), section), key)} if key else known[name]
        assert values == {float(text.replace(",", ""))}, name
    assert len(quoted) > ENOUGH


def test_the_page_names_tests_that_exist() -> None:
    tests = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "tests").rglob("test_*.py")))
    named = re.findall(r"`(test_\w+)`", PAGE)
    assert named
    assert [name for name in named if f"def {name}(" not in tests] == []
