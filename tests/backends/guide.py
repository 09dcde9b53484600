"""The code of the guide in docs/backends.md, as a module that can be imported."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "backends.md"
MODULE = "kvtide_guide_store"


def guide_code() -> str:
    """The guide's only Python block."""
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return code


def write_guide_module(folder: Path) -> str:
    """Write the code into a folder of sys.path; returns its import path."""
    (folder / f"{MODULE}.py").write_text(guide_code(), encoding="utf-8")
    return f"{MODULE}:SqliteStore"
