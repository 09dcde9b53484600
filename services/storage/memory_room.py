"""How much memory this process may still take: the machine's, or its container's if that is less."""

from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")  # of this process's container, or of the whole machine


def available_memory(cgroup: Path = CGROUP) -> int:
    """Bytes that can be allocated now. File pages that the kernel may drop count as available."""
    available = int(psutil.virtual_memory().available)
    limit = memory_limit(cgroup)
    if limit is None:
        return available
    used = int((cgroup / "memory.current").read_text())
    fields = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    return min(available, limit - used + int(fields["inactive_file"]) + int(fields["active_file"]))


def memory_limit(cgroup: Path = CGROUP) -> int | None:
    """The container's limit in bytes (cgroup v2), None if there is none."""
    try:
        text = (cgroup / "memory.max").read_text().strip()
    except OSError:
        return None
    return None if text == "max" else int(text)
