"""What a check of `kvtide doctor` finds."""

from pathlib import Path
from typing import Literal

import msgspec

GIB, MIB = 2**30, 2**20


class Verdict(msgspec.Struct, frozen=True):
    """One line. `fail`: the stack can't start or would break; `warn`: it runs, with less than it could have."""

    state: Literal["ok", "warn", "fail"]
    what: str  # the name of the check
    text: str  # what was found, with the numbers
    remedy: str = ""  # what to do; empty when it is ok


def size(count: float) -> str:
    """Bytes as a person says them."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.0f} MiB"


def nearest(path: Path) -> Path:
    """The path itself, or its nearest parent that exists."""
    return next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
