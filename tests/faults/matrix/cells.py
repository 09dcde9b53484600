"""The cells of the matrix: who is hit by what, and in the middle of what."""

from itertools import product
from typing import NamedTuple

SERVICES = ("gateway", "scheduler", "gpu_worker", "storage")
SERVICE_FAULTS = ("kill -9", "pause", "restart")
NEW_PROCESS = ("kill -9", "restart")  # after these another process has the identity
ACTIVITIES = ("idle", "prefilling", "loading back", "writing back", "prefetching", "decoding")
PAGE_LINK = "gpu_worker-storage"
LINKS = ("gateway-scheduler", "gpu_worker-scheduler", "storage-scheduler", PAGE_LINK)
LINK_FAULTS = ("delay", "stall", "reset", "corrupt", "throttle")
DISK_FAULTS = ("full", "read-only", "slow", "failing", "truncating")
TRAFFIC = "traffic"  # what goes on while a link or the disk is hit


class Cell(NamedTuple):
    """One fault."""

    part: str  # a service, a link, or "disk"
    fault: str
    activity: str

    def __str__(self) -> str:
        return f"{self.part} {self.fault}, {self.activity}"


# A service comes up every fourth time only: one that dies again at once is started again with a longer delay.
SERVICE_CELLS = [
    Cell(service, fault, activity) for activity, fault, service in product(ACTIVITIES, SERVICE_FAULTS, SERVICES)
]
DISK_CELLS = [Cell("disk", fault, TRAFFIC) for fault in DISK_FAULTS]
LINK_CELLS = [Cell(link, fault, TRAFFIC) for link, fault in product(LINKS, LINK_FAULTS)]
