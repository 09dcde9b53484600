"""Points where a fault test stops, kills or delays this process. They cost nothing unless KVTIDE_TEST_HOOKS is set."""

import os
import signal
import time
from pathlib import Path

from shared.errors import ConfigError

VARIABLE = "KVTIDE_TEST_HOOKS"  # a folder; a file in it named as a point arms that point once

folder: Path | None = Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None


def arm(hooks: Path, point: str, text: str) -> None:
    """Put a file into a hooks folder, whole: a process that comes to the point must not read half of it."""
    written = hooks / f".{point}"
    written.write_text(text, encoding="utf-8")
    written.replace(hooks / point)


def reach(point: str) -> str:
    """Act on the file `point` in the hooks folder, if there is one, and remove it first.

    Its text: "stop" (SIGSTOP), "kill" (SIGKILL), "sleep SECONDS", or "skip", which is returned for the caller to obey.
    Returns "" otherwise. Raises ConfigError for any other text.
    """
    if folder is None:
        return ""
    file = folder / point
    try:
        text = file.read_text(encoding="utf-8").strip()
        file.unlink()
    except FileNotFoundError:
        return ""
    match text.split():
        case ["stop"]:
            os.kill(os.getpid(), signal.SIGSTOP)
        case ["kill"]:
            os.kill(os.getpid(), signal.SIGKILL)
        case ["sleep", seconds]:
            time.sleep(float(seconds))
        case ["skip"]:
            return "skip"
        case _:
            raise ConfigError(f"hook {file} holds {text!r}; use stop, kill, sleep SECONDS or skip")
    return ""
