"""Compiles the scheduler's core and its simulation with mypyc: `python -m kvtide.compile`, a part of `make setup`.

Both stay plain Python that runs without it: see `shared/compiled.py`.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from kernels.build import find_compiler
from kvtide.file_lock import wait_for_lock
from shared.compiled import BUILD_FOLDER, ROOT, compiled_folder, sources

OPTIMIZE = "1"  # level 2 takes half as long again and makes code that is no faster
KEPT = 4  # folders of code: of branches that one goes back to, and of processes that still run
TIMEOUT_S = 900.0  # it takes half a minute; a hung compiler must not hang `make setup`


def build(say: Callable[[str], None] = print) -> tuple[bool, str]:
    """Compile unless it is done already; while another process does it, wait, and `say` so. Returns (the code is there,
    what was done or why not); never raises for a missing or failing compiler or a folder that can't be written."""
    target = compiled_folder()
    if target.exists():
        return True, ""
    if find_spec("mypyc") is None or find_spec("setuptools") is None:
        return False, "mypy or setuptools is not installed (pip install -c constraints.txt mypy setuptools)"
    if find_compiler() is None:
        return False, "no C compiler (looked for $CC, cc, gcc, clang)"
    try:
        BUILD_FOLDER.mkdir(exist_ok=True)
        return _compile_once(target, say)
    except OSError as error:
        return False, f"can't build in {BUILD_FOLDER}: {error}"


def _compile_once(target: Path, say: Callable[[str], None]) -> tuple[bool, str]:
    """One process at a time: the next finds what it wanted done."""
    folder = os.open(BUILD_FOLDER, os.O_RDONLY)
    try:
        if not wait_for_lock(folder, TIMEOUT_S, lambda: say("waiting: another process compiles the core")):
            return False, f"another process has held {BUILD_FOLDER} for {TIMEOUT_S:.0f} s: end it and try again"
        if target.exists():
            return True, ""
        with tempfile.TemporaryDirectory(dir=BUILD_FOLDER) as scratch:
            return _compile(Path(scratch), target)
    finally:
        os.close(folder)


def _compile(scratch: Path, target: Path) -> tuple[bool, str]:
    command = [sys.executable, "-m", "kvtide.compile", str(scratch)]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return False, f"mypyc took longer than {TIMEOUT_S:.0f} s"
    if done.returncode:
        return False, f"mypyc failed with {done.returncode}: {(done.stdout + done.stderr).strip()[-2000:]}"
    (scratch / "code").replace(target)
    for old in sorted(BUILD_FOLDER.glob("core-*"), key=lambda folder: folder.stat().st_mtime)[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return True, f"built {target} with mypyc"


def _run_mypyc(scratch: Path) -> None:
    """In a process of its own: setuptools and mypyc end theirs when something is wrong."""
    from mypyc.build import mypycify
    from setuptools import setup  # type: ignore[import-untyped]

    modules = mypycify(
        ["--cache-dir", str(scratch / "mypy"), *map(str, sources())],
        opt_level=OPTIMIZE,
        debug_level="0",
        multi_file=True,  # so that all processors have work
        target_dir=str(scratch / "c"),
    )
    options = ["--build-lib", str(scratch / "code"), "--build-temp", str(scratch / "o")]
    jobs = str(os.cpu_count() or 1)
    setup(name="kvtide-core", packages=[], ext_modules=modules, script_args=["build_ext", "-j", jobs, *options])


def main(arguments: list[str]) -> int:
    """Build and say what happened; the exit status is 0 when the code is there."""
    if arguments:
        _run_mypyc(Path(arguments[0]))
        return 0
    built, message = build()
    if message:
        print(message, file=sys.stdout if built else sys.stderr)
    return 0 if built else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
