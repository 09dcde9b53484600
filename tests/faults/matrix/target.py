"""What the faults are done to: a stack, on processes of this machine or in containers."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any


class Target(ABC):
    """A stack whose services a fault hits, by role such as "gpu_worker"; the stack starts a dead one again itself."""

    model: str  # what the API calls it
    hooks: Path  # the folder of its test hooks (shared/test_hooks.py)

    @property
    @abstractmethod
    def url(self) -> str:
        """The gateway's. Raises StackError while there is none."""

    @abstractmethod
    def identity(self, service: str) -> str:
        """What the status calls a service."""

    @abstractmethod
    async def status(self) -> dict[str, Any]:
        """What the scheduler says of itself: docs/operations.md. Raises StackError while it can't be had."""

    @abstractmethod
    async def healthy(self) -> bool:
        """Does the gateway say that every part is ready?"""

    @abstractmethod
    async def settle(self) -> None:
        """Wait until the stack is idle: what was asked is in all tiers. Fails if it stays busy or is unsound."""

    @abstractmethod
    async def kill(self, service: str) -> None:
        """SIGKILL."""

    @abstractmethod
    async def restart(self, service: str) -> None:
        """SIGTERM, and another process after it; returns with it or before."""

    @abstractmethod
    async def pause(self, service: str) -> None:
        """It gets no more CPU, until `resume`."""

    @abstractmethod
    async def resume(self, service: str) -> None:
        """End a pause."""

    @abstractmethod
    async def disturb(self, link: str, fault: str, seconds: float) -> int:
        """Carry out a fault of a link (tests/faults/matrix/links.py); returns how many pieces it got meanwhile."""

    @abstractmethod
    async def keep_logs(self, folder: Path) -> None:
        """Write what each service has logged into a folder."""
