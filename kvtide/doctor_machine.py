"""What `kvtide doctor` looks at in the machine: memory, disk, cores, compiler, kernels, the core."""

import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from kernels import checksum, page_copy
from kernels.build import find_compiler, library_path
from kvtide.doctor_verdict import Verdict, nearest, size
from kvtide.tiers import geometry_of
from services.scheduler.core import core as scheduler_core
from shared.compiled import SUFFIX, VARIABLE
from shared.config import Config
from shared.errors import ModelError

CGROUP = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")
LIMITS = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))
PROCESSES_BYTES = 1200 * 2**20  # four Python processes, one of them with torch: estimated, and some room
MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "hugetlbfs")
FEW_CORES = 2  # below: the gateway's and the storage's work waits for each step


def memory(config: Config) -> Iterator[Verdict]:
    """Free memory, a container's limit respected, against processes, weights and both pools."""
    free, limited = free_memory()
    where = "free within the container's limit" if limited else "free"
    need, parts = PROCESSES_BYTES, [f"{size(PROCESSES_BYTES)} processes"]
    for name, amount in (("weights", _weights(config)), ("L1", _device(config)), ("L2", config.cache.host_bytes)):
        if amount:
            need += amount
            parts.append(f"{size(amount)} {name}")
    text = f"{size(free)} {where}; about {size(need)} needed ({', '.join(parts)})"
    if need <= free:
        yield Verdict("ok", "memory", text)
        return
    remedy = "end other programs, raise the container's limit, or set cache.host_bytes or cache.device_tokens lower"
    # Weights and pools are taken whole at the start; what the processes need is an estimate.
    yield Verdict("fail" if need - PROCESSES_BYTES > free else "warn", "memory", text, remedy)


def free_memory() -> tuple[int, bool]:
    """Bytes that can still be had, and whether a container's limit is what bounds them."""
    free = psutil.virtual_memory().available
    rooms = [
        room for folder in _cgroups() for limit, used in LIMITS if (room := _room(folder, limit, used)) is not None
    ]
    least = min(rooms, default=free)
    return min(free, least), least < free


def _cgroups() -> Iterator[Path]:
    """Our control group and all above it: each may have a limit. In a container the mount's root is our own."""
    try:
        lines = OWN_CGROUP.read_text().splitlines()
    except OSError:
        lines = []
    own = next((line[3:] for line in lines if line.startswith("0::")), "/")
    folder = CGROUP / own.lstrip("/")
    yield from (each for each in (folder, *folder.parents) if each.is_relative_to(CGROUP))


def _room(folder: Path, limit: str, used: str) -> int | None:
    try:
        bound = (folder / limit).read_text().strip()
        taken = int((folder / used).read_text())
        cached = _inactive_files(folder / Path(limit).with_name("memory.stat"))
    except (OSError, ValueError):
        return None  # there is no limit of this kind
    return None if bound == "max" else max(0, int(bound) - taken + cached)


def _inactive_files(stat: Path) -> int:
    """Bytes of cached files that the kernel gives back when memory is wanted."""
    pairs = (line.split() for line in stat.read_text().splitlines())
    return next((int(value) for name, value in pairs if name in ("inactive_file", "total_inactive_file")), 0)


def _weights(config: Config) -> int:
    folder = Path(config.model.path)
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) if config.model.path else 0


def _device(config: Config) -> int:
    try:
        return config.cache.device_tokens * geometry_of(config).token_bytes if config.model.path else 0
    except ModelError:
        return 0  # the model's own line says what is wrong


def segment_room(config: Config) -> Iterator[Verdict]:
    """The folder of the host pools: there, in memory, and with room."""
    wanted, folder = config.cache.host_bytes, Path(config.storage.segment_folder)
    if not wanted:
        yield Verdict("ok", "host pool", "off: cache.host_bytes is 0")
        return
    if not os.access(folder, os.W_OK | os.X_OK):
        remedy = "set storage.segment_folder to a tmpfs that this user can write"
        yield Verdict("fail", "host pool", f"{folder} is missing or can't be written", remedy)
        return
    free = shutil.disk_usage(folder).free
    text = f"{size(free)} free in {folder}, {size(wanted)} wanted (cache.host_bytes)"
    if free < wanted:
        remedy = f"set cache.host_bytes to at most {free}, or enlarge {folder} (docker run --shm-size, mount -o size=)"
        yield Verdict("fail", "host pool", text, remedy)
    elif (kind := file_system(folder)) not in MEMORY_FILE_SYSTEMS:
        yield Verdict("warn", "host pool", f"{folder} is {kind}, not memory", "set storage.segment_folder to a tmpfs")
    else:
        yield Verdict("ok", "host pool", text)


def file_system(path: Path) -> str:
    """Type of the file system that a path lies on, such as "tmpfs"."""
    mounts = [(Path(part.mountpoint), part.fstype) for part in psutil.disk_partitions(all=True)]
    around = [(len(mount.parts), kind) for mount, kind in mounts if path.resolve().is_relative_to(mount)]
    return max(around, default=(0, "unknown"))[1]


def disk(config: Config) -> Iterator[Verdict]:
    """Room for page files against quota and floor; what is stored already counts as room."""
    storage = config.storage
    if storage.backend not in ("hash_file", "file") or not config.cache.host_bytes:
        yield Verdict("ok", "disk", f"no page files (storage.backend is {storage.backend})")
        return
    folder = config.storage_folder
    there = nearest(folder)
    if not os.access(there, os.W_OK | os.X_OK):
        yield Verdict("fail", "disk", f"{there} can't be written", "set storage.folder to a folder of this user")
        return
    free, kept = shutil.disk_usage(there).free, _files(folder)
    room = free + kept - storage.free_floor_bytes
    text = (
        f"{size(free)} free for {folder}, which holds {size(kept)}; "
        f"quota {size(storage.quota_bytes)}, floor {size(storage.free_floor_bytes)}"
    )
    if room >= storage.quota_bytes:
        yield Verdict("ok", "disk", text)
        return
    remedy = "free some disk, set storage.folder to another one, or set storage.quota_bytes or free_floor_bytes lower"
    keeps = f"L3 can keep {size(room)} of its quota" if room > 0 else "L3 can keep nothing"
    yield Verdict("warn", "disk", f"{text}: {keeps}", remedy)


def _files(folder: Path) -> int:
    """Bytes of the page files. Tolerates a stack that removes some meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(parent) / name).lstat().st_blocks * 512
            except FileNotFoundError:
                continue
    return total


def cores(config: Config) -> Iterator[Verdict]:
    """Compute threads against the cores that this process may use, a container's share respected."""
    usable = len(os.sched_getaffinity(0))
    share = cpu_share()
    have = min(float(usable), share or usable)
    threads = config.worker.threads or usable
    text = f"{have:g} usable, {threads} compute threads (worker.threads)"
    if threads > have:
        remedy = f"set worker.threads to {max(1, int(have))}: more threads than cores make every step slower"
        yield Verdict("warn", "cores", text, remedy)
    elif have < FEW_CORES:
        yield Verdict("warn", "cores", text, "give it two cores or more: the services share this one with the model")
    else:
        yield Verdict("ok", "cores", text)


def cpu_share() -> float | None:
    """Cores that a container's quota allows; None where there is none."""
    shares = []
    for folder in _cgroups():
        try:
            quota, period = (folder / "cpu.max").read_text().split()
            shares += [] if quota == "max" else [int(quota) / int(period)]
        except (OSError, ValueError):
            continue  # the root group has no such file, and cgroup 1 none at all
    return min(shares, default=None)


def compiler(config: Config) -> Iterator[Verdict]:
    """A C compiler, or the extension that one has made."""
    command = find_compiler()
    if command is not None:
        yield Verdict("ok", "compiler", " ".join(command))
    elif library_path().exists():
        yield Verdict("ok", "compiler", "none, and none is needed: the C extension is built")
    else:
        remedy = f"install gcc or clang, or set CC, then run {_build('kernels.build')} and {_build('kvtide.compile')}"
        yield Verdict("warn", "compiler", "none (looked for $CC, cc, gcc, clang)", remedy)


def kernels(config: Config) -> Iterator[Verdict]:
    """Which versions of the kernels run, and why."""
    for name, version in (("page copy", page_copy.which()), ("checksum", checksum.which())):
        if version.startswith("C ("):
            yield Verdict("ok", name, version)
        else:
            remedy = f"run {_build('kernels.build')} (it needs a C compiler)"
            yield Verdict("warn", name, f"{version}: slower", remedy)


def core(config: Config) -> Iterator[Verdict]:
    """Does the scheduler's core run as machine code?"""
    if str(scheduler_core.__file__).endswith(SUFFIX):
        yield Verdict("ok", "core", "compiled")
    elif os.environ.get(VARIABLE) == "0":
        yield Verdict("warn", "core", f"plain Python, as {VARIABLE}=0 asks: half as fast", f"unset {VARIABLE}")
    else:
        remedy = f"run {_build('kvtide.compile')} (it needs a C compiler and Python's headers)"
        yield Verdict("warn", "core", "plain Python, not compiled from these sources: half as fast", remedy)


def _build(module: str) -> str:
    return f"{shlex.quote(sys.executable)} -m {module}"
