"""The core is pure: no socket, clock, thread, file, torch or asyncio, in its modules and in ours that they import."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CORE = ROOT / "services" / "scheduler" / "core"
FORBIDDEN = {
    "aiofiles", "asyncio", "ctypes", "datetime", "io", "mmap", "multiprocessing", "os", "pathlib", "random", "select",
    "socket", "subprocess", "threading", "time", "torch", "zmq",
}  # fmt: skip
FORBIDDEN_CALLS = {"open", "print", "input", "exec", "eval", "__import__"}


def _impurities(files: list[Path]) -> list[str]:
    """What the files import or call and must not, those of our own modules that they import included."""
    found: list[str] = []
    seen: set[Path] = set()
    todo = list(files)
    while todo:
        path = todo.pop()
        if path in seen:
            continue
        seen.add(path)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS:
                found.append(f"{path.name} calls {node.func.id}")
            if isinstance(node, ast.AsyncFunctionDef | ast.Await):
                found.append(f"{path.name} is asynchronous")
            for name in _imported(node):
                if name.split(".")[0] in FORBIDDEN:
                    found.append(f"{path.name} imports {name}")
                todo += _own_file(name)
    return found


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def _own_file(name: str) -> list[Path]:
    base = ROOT.joinpath(*name.split("."))
    candidates = [base.with_suffix(".py"), base / "__init__.py"]
    return [path for path in candidates if name.startswith(("services.", "shared", "kernels")) and path.is_file()]


def test_purity_of_every_module_of_the_core() -> None:
    files = sorted(CORE.glob("*.py"))
    assert len(files) > 15
    assert _impurities(files) == []


def test_purity_a_fresh_interpreter_loads_no_forbidden_library_with_the_core() -> None:
    script = (
        "import sys, numpy, msgspec; before = set(sys.modules); import services.scheduler.core.core;"
        "print(*sorted({name.split('.')[0] for name in set(sys.modules) - before}))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    ).stdout.split()
    assert "services" in loaded
    assert not {"aiofiles", "asyncio", "socket", "torch", "zmq"}.intersection(loaded)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("import zmq", "imports zmq"),
        ("from asyncio import sleep", "imports asyncio"),
        ("def f():\n    import time\n    return time.time()", "imports time"),
        ("def f():\n    return open('x')", "calls open"),
        ("async def f():\n    pass", "is asynchronous"),
        ("from shared.transport import Router", "imports zmq"),
    ],
)
def test_purity_is_really_checked(tmp_path: Path, text: str, what: str) -> None:
    planted = tmp_path / "planted.py"
    planted.write_text(text, encoding="utf-8")
    assert any(what in found for found in _impurities([planted]))
