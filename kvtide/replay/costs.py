"""How long the peers of a replay take: not at all, or as long as a machine's speeds say."""

from typing import NamedTuple, Protocol

GIGA = 1e9


class Costs(Protocol):
    """Says when work that begins now, or when what is before it has ended, is done (seconds)."""

    def step(self, now: float, pages: int, loads_end: float) -> float:
        """A forward pass over `pages` of prompts; its loads are in at `loads_end`."""

    def copy(self, now: float, pages: int, *, load: bool) -> float:
        """Host -> device (load) or device -> host."""

    def disk(self, now: float, pages: int, *, read: bool) -> float:
        """L3 -> host (read) or host -> L3."""


class Instant:
    """Everything is done at once."""

    def step(self, now: float, pages: int, loads_end: float) -> float:
        """See Costs."""
        return now

    def copy(self, now: float, pages: int, *, load: bool) -> float:
        """See Costs."""
        return now

    def disk(self, now: float, pages: int, *, read: bool) -> float:
        """See Costs."""
        return now


class Speeds(NamedTuple):
    """A model on a machine."""

    prefill: float  # tokens/s
    copy: float  # GB/s, each way between host and device
    disk: float  # GB/s, reading and writing L3
    kv_bytes: int  # of a token over all layers


# Round numbers for a start: measure your own (`kvtide bench`, the engine's log) before you buy memory by them.
PRESETS = {
    "8b-h100": Speeds(30_000, 50.0, 6.0, 131_072),  # Llama-3-8B in bf16; PCIe 5 x16, an NVMe drive
    "8b-a100": Speeds(12_000, 22.0, 5.0, 131_072),  # PCIe 4 x16
    "8b-l4": Speeds(3_500, 22.0, 3.0, 131_072),
    "70b-8xh100": Speeds(9_000, 200.0, 12.0, 327_680),  # Llama-3-70B, TP 8; the ranks copy side by side
    "small-cpu": Speeds(1_000, 8.0, 1.5, 24_576),  # half a billion parameters in float32 on a few cores
}


class Modelled:
    """Each stream does one thing after the other; a step computes while its loads come in, and ends after both."""

    def __init__(self, speeds: Speeds, page_size: int) -> None:
        self._step_s = page_size / speeds.prefill  # seconds a page
        self._copy_s = page_size * speeds.kv_bytes / (speeds.copy * GIGA)
        self._disk_s = page_size * speeds.kv_bytes / (speeds.disk * GIGA)
        self._free: dict[str, float] = {}  # stream -> when it has done what it was given

    def step(self, now: float, pages: int, loads_end: float) -> float:
        """See Costs."""
        end = max(self._after("compute", now, pages * self._step_s), loads_end)
        self._free["compute"] = end
        return end

    def copy(self, now: float, pages: int, *, load: bool) -> float:
        """See Costs."""
        return self._after("load" if load else "write", now, pages * self._copy_s)

    def disk(self, now: float, pages: int, *, read: bool) -> float:
        """See Costs."""
        return self._after("read" if read else "archive", now, pages * self._disk_s)

    def _after(self, stream: str, now: float, seconds: float) -> float:
        end = self._free[stream] = max(now, self._free.get(stream, 0.0)) + seconds
        return end
