"""Compiles the C kernels into `kernels/_build/`: `python -m kernels.build`.

The file's name holds a hash of source, flags and machine, so that a checkout shared between machines or images never
loads another's code. Nothing here runs at import.
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

NAMES = ("page_copy.c", "page_files.c", "paged_attention.c", "linear.c", "rowwise.c")
SOURCES = tuple(map(Path(__file__).with_name, NAMES))
HEADERS = tuple(map(Path(__file__).with_name, ("crc32c.h", "vectors.h", "linear_tile.h")))
BUILD_FOLDER = Path(__file__).with_name("_build")
FLAGS = ("-O3", "-shared", "-fPIC", "-std=c11", "-pthread", "-fno-math-errno")
COMPILE_TIMEOUT_S = 120  # it takes ten seconds; a hung compiler must not hang `make setup`


def library_path() -> Path:
    """Where the shared object for these sources, these flags and this machine is, or would be."""
    machine = " ".join((platform.system(), platform.machine(), *platform.libc_ver()))
    content = b"".join(source.read_bytes() for source in (*SOURCES, *HEADERS))
    key = hashlib.sha256(content + " ".join(FLAGS).encode() + machine.encode()).hexdigest()[:16]
    return BUILD_FOLDER / f"kernels-{key}.so"


def find_compiler() -> list[str] | None:
    """The C compiler's command: `$CC` if set, else cc, gcc or clang; None when there is none."""
    wanted = [shlex.split(os.environ["CC"])] if os.environ.get("CC") else [["cc"], ["gcc"], ["clang"]]
    for command in wanted:
        if command and shutil.which(command[0]):
            return command
    return None


def build() -> tuple[bool, str]:
    """Compile unless it is done already. Returns (the library is there, what happened or why not); never raises for
    a missing or failing compiler or a folder that can't be written."""
    target = library_path()
    if target.exists():
        return True, f"{target} is up to date"
    compiler = find_compiler()
    if compiler is None:
        return False, "no C compiler (looked for $CC, cc, gcc, clang); torch copies pages and attends, more slowly"
    try:
        BUILD_FOLDER.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILD_FOLDER) as scratch:
            return _compile(compiler, Path(scratch) / "kernels.so", target)
    except OSError as error:
        return False, f"can't build in {BUILD_FOLDER}: {error}"


def _compile(compiler: list[str], scratch: Path, target: Path) -> tuple[bool, str]:
    command = [*compiler, *FLAGS, "-o", str(scratch), *map(str, SOURCES)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return False, f"{compiler[0]} took longer than {COMPILE_TIMEOUT_S} s"
    if done.returncode:
        return False, f"{shlex.join(command)} failed with {done.returncode}: {done.stderr.strip()[-2000:]}"
    scratch.replace(target)
    return True, f"built {target} with {compiler[0]} {' '.join(FLAGS)}"


def main() -> int:
    """Build and say what happened; the exit status is 0 when the library is there."""
    built, message = build()
    print(message, file=sys.stdout if built else sys.stderr)
    return 0 if built else 1


if __name__ == "__main__":
    sys.exit(main())
