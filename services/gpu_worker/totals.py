"""What the worker did since its start: the numbers of its heartbeat."""

from services.gpu_worker.operations import Load, Operation, Step, Write
from shared.geometry import PageGeometry
from shared.messages.common import Message, OperationFailed
from shared.messages.worker import LoadDone, StepDone, WriteDone

INT_BYTES = 4  # of a packed int32

NAMES = (
    "steps",
    "step_seconds",
    "prompt_tokens",  # computed several at a time
    "decode_tokens",  # computed one at a time
    "write_pages",
    "write_bytes",
    "write_seconds",
    "load_pages",
    "load_bytes",
    "load_seconds",
    "load_failed",  # loads
    "checksum_failed",  # pages
)


class Totals:
    """Sums over all answered operations."""

    def __init__(self, geometry: PageGeometry) -> None:
        self._page_bytes = geometry.page_bytes
        self.values = dict.fromkeys(NAMES, 0.0)

    def add(self, operation: Operation, answer: Message) -> None:
        """Count an operation that has ended with `answer`."""
        match operation, answer:
            case Step(), StepDone():
                self._sum(steps=1, step_seconds=answer.compute_s)
                for item in operation.command.items:
                    tokens = max(1, len(item.tokens) // INT_BYTES)
                    self._sum(prompt_tokens=tokens if tokens > 1 else 0, decode_tokens=tokens == 1)
            case Write(), WriteDone():
                pages = len(operation.host_pages)
                self._sum(write_pages=pages, write_bytes=pages * self._page_bytes, write_seconds=answer.seconds)
            case Load(), LoadDone():
                pages = len(operation.host_pages)
                self._sum(load_pages=pages, load_bytes=pages * self._page_bytes, load_seconds=answer.seconds)
            case Load(), OperationFailed():
                bad = len(answer.positions) // INT_BYTES if answer.reason == "checksum" else 0
                self._sum(load_failed=1, checksum_failed=bad)

    def _sum(self, **amounts: float) -> None:
        for name, amount in amounts.items():
            self.values[name] += amount
