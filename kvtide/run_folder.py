"""The run folder: private to its user, claimed by one supervisor, clean when that starts and when it ends."""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

from kvtide.child import StackError
from shared.config import Config
from shared.errors import ConfigError
from shared.segment_files import remove_stale_segments

LOCK_NAME = "supervisor.lock"
CHILDREN_NAME = "children.json"  # identity -> [pid, start time]: what a supervisor that was killed may leave running
GATEWAY_NAME = "gateway.json"  # where the gateway listens
LOGS_NAME = "logs"
STORAGE_ID = "storage-0"
SOCKET_BYTES = 107  # Linux's limit of a Unix socket's path
SOCKET_ROOM = len("/scheduler.sock")
ORPHAN_GRACE_S = 10.0  # for the children of a killed supervisor to end by themselves, as they do when its pipe closes
ORPHAN_POLL_S = 0.05  # a service ends within 0.1 to 2 s
SAME_START_S = 0.05  # two readings of one process's start time differ by rounding only; ticks are 10 ms


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Make the folder, private, and hold it. Raises StackError naming the process that holds it already."""
    _make_private(folder)
    with (folder / LOCK_NAME).open("a+") as file:  # the kernel drops the lock with the process
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            pid = file.read().strip() or "unknown"
            raise StackError(
                f"a stack already runs in {folder}: process {pid}; stop it (kill {pid}) "
                "or start this one with --set run.name=ANOTHER"
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def _make_private(folder: Path) -> None:
    if len(os.fsencode(folder)) + SOCKET_ROOM > SOCKET_BYTES:
        raise ConfigError(
            f"run.folder {folder} is too long for a socket's path: use {SOCKET_BYTES - SOCKET_ROOM} bytes"
        )
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        (folder / LOGS_NAME).mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise StackError(f"can't make the run folder {folder}: {error.strerror}; set run.folder") from None
    found = folder.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise StackError(f"the run folder {folder} can be written by other users: remove it or set run.folder")


def record_children(folder: Path, pids: Mapping[str, int]) -> None:
    """Write down who runs, in one step, for the supervisor that may follow a killed one."""
    found = {identity: [pid, _start_time(pid)] for identity, pid in pids.items()}
    fresh = folder / f"{CHILDREN_NAME}.new"
    fresh.write_text(json.dumps(found))
    fresh.replace(folder / CHILDREN_NAME)


def end_orphans(folder: Path) -> list[str]:
    """End what a killed supervisor left running; returns who had to be killed. Blocks."""
    recorded = dict(_recorded(folder))
    killed = _wait_for_ends(recorded)
    for identity in killed:
        with contextlib.suppress(psutil.NoSuchProcess):
            recorded[identity].kill()
    if left := _wait_for_ends({identity: recorded[identity] for identity in killed}):
        raise StackError(f"{', '.join(left)} of an earlier stack can't be killed: see {folder / CHILDREN_NAME}")
    (folder / CHILDREN_NAME).unlink(missing_ok=True)
    return killed


def _wait_for_ends(processes: Mapping[str, psutil.Process]) -> list[str]:
    deadline = time.monotonic() + ORPHAN_GRACE_S
    while True:
        alive = [identity for identity, process in processes.items() if _lives(process)]
        if not alive or time.monotonic() > deadline:
            return alive
        time.sleep(ORPHAN_POLL_S)


def _lives(process: psutil.Process) -> bool:
    """A zombie doesn't: it holds nothing any more, and only its parent, the init process, can reap it."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def remove_leftovers(config: Config) -> None:
    """Remove what the services of this stack made and, being killed, left: sockets, the gateway's address, segments.

    Only while the folder is claimed and no child runs. Raises SegmentError when a storage of a stack of the same name
    lives, in another run folder.
    """
    folder = config.run_folder
    remove_stale_segments(Path(config.storage.segment_folder), config.run.name, STORAGE_ID)
    for path in (*folder.glob("*.sock"), folder / GATEWAY_NAME):
        path.unlink(missing_ok=True)


def _recorded(folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    try:
        recorded = json.loads((folder / CHILDREN_NAME).read_text())
    except (OSError, ValueError):  # there is none, or the machine stopped while it was written
        return
    for identity, (pid, started) in recorded.items():
        try:
            process = psutil.Process(pid)
            if abs(process.create_time() - started) < SAME_START_S:
                yield identity, process
        except psutil.NoSuchProcess:
            continue  # it has ended


def _start_time(pid: int) -> float:
    try:
        return psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:
        return 0.0  # it died at once: matches no process
