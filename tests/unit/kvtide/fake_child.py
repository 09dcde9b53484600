"""A child for the supervisor's tests: it ends with its parent like a service, and notes what happens to it."""

import os
import select
import signal
import sys
import time
from pathlib import Path


def main(name: str, notes: Path, behaviour: str) -> int:
    """`behaviour`: "serve", "fail" (status 1 at once), "deaf" (ignores SIGTERM)."""

    def note(word: str) -> None:
        with notes.open("a") as file:
            file.write(f"{word} {name} {os.getpid()} {time.monotonic()}\n")

    if behaviour == "fail":
        note("start")
        print(f"{name} has nothing to serve", file=sys.stderr)
        return 1
    stop_read, stop_write = os.pipe()
    signal.signal(signal.SIGTERM, lambda *_: None if behaviour == "deaf" else os.write(stop_write, b"x"))
    note("start")
    parent = int(os.environ["KVTIDE_PARENT_FD"])
    ready, _, _ = select.select([parent, stop_read], [], [], 60.0)
    note("orphan" if parent in ready else "stop")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))
