"""What `kvtide status` shows of a status as the scheduler sends it."""

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from kvtide.guest import Guest
from kvtide.stack import is_idle, unfinished
from kvtide.status import print_status

POOL = {"total": 48, "free": 35, "evictable": 13, "protected": 0, "requests": 0, "in_flight": 0, "quarantined": 0}
STATUS = {
    "ready": True,
    "integrity": "ok",
    "locked": 0,
    "in_flight": 0,
    "quarantined": 0,
    "regret": {"requests": 512, "hit_rate": 0.2519, "optimal_hit_rate": 0.4},
    "requests": {"queued": 0, "running": 2, "open": 2},
    "device": POOL,
    "host": {"storage-0": {"total": 255, "free": 242, "cached": 13}},
    "peers": [
        {"identity": "storage-0", "role": "storage", "epoch": 1, "up": False, "silent_s": 4.5, "stats": {}},
        {"identity": "cli-77", "role": "gateway", "epoch": 2, "up": True, "silent_s": 0.0, "stats": {}},
    ],
    "counters": {"prompt_tokens": 41412},
}


def shown(status: dict[str, object]) -> str:
    console = Console(width=100, file=io.StringIO())
    with console.capture() as captured:
        print_status(status, console)
    return captured.get()


def test_a_status_is_readable() -> None:
    text = shown(STATUS)
    assert "ready  integrity ok  locked 0  in_flight 0  quarantined 0" in text
    assert "requests: running 2  open 2" in text
    assert "device (pages): total 48  free 35  evictable 13" in text
    assert "host storage-0 (pages): total 255  free 242  cached 13" in text
    assert "the last 512 requests: 25.2% of prompt tokens from device and host, the best cache" in text
    assert "4.5 s" in text
    assert "41,412" in text
    assert "cli-77" not in text


def test_a_stack_without_host_tier_and_requests_can_be_shown() -> None:
    text = shown({**STATUS, "ready": False, "host": None, "requests": {"open": 0}, "regret": None})
    assert "not ready" in text
    assert "requests: none" in text
    assert "host" not in text


def test_idle_means_that_nothing_is_open_or_held() -> None:
    assert unfinished(STATUS) == 2
    idle = {**STATUS, "requests": {"open": 0}}
    assert is_idle(idle)
    for key in ("locked", "in_flight", "quarantined"):
        assert not is_idle({**idle, key: 1})


class _Silent(Guest):
    def on_scheduler(self, epoch: int) -> None: ...

    def on_message(self, message: Any) -> None: ...


async def test_guests_of_one_process_have_two_names_at_a_time_and_use_them_again(tmp_path: Path) -> None:
    """The scheduler tells its peers apart by name: of two with one name the older one would get no answer."""
    first, second = _Silent(f"ipc://{tmp_path}/s"), _Silent(f"ipc://{tmp_path}/s")
    async with first, second:
        assert first.hello() != second.hello()
    third = _Silent(f"ipc://{tmp_path}/s")
    async with third:
        assert third.hello() == first.hello()
