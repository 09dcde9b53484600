"""Ordered queues of work that takes virtual time, as the worker's compute, write and load streams."""

from collections import deque
from collections.abc import Callable
from functools import partial

from kvtide.simulation.clock import Action
from kvtide.simulation.process import Pausable
from shared.messages.common import Message


class Job:
    """One operation on a stream: it waits for others, runs its parts one after the other, then answers."""

    begun: bool = False
    cancelled: bool = False
    ended: bool = False
    ok: bool = False

    def __init__(
        self,
        op_id: int,
        epoch: int,
        waits_for: list["Job"],
        parts: list[tuple[float, Action]],
        answer: Callable[[], Message],
        *,
        stop_early: bool = False,
    ) -> None:
        self.op_id = op_id
        self.epoch = epoch  # of the scheduler that sent it
        self.waits_for = waits_for
        self.parts = parts  # (seconds before it, what it does)
        self.answer = answer
        self.pages: set[int] = set()  # device pages that a step may write to
        self.stop_early = stop_early  # a copy ends at its next part when cancelled, a step doesn't
        self.then: list[Action] = []

    @property
    def seconds(self) -> float:
        """That it takes, without waiting."""
        return sum(delay for delay, _ in self.parts)


class Stream:
    """Runs its jobs one at a time, in order."""

    def __init__(self, process: Pausable, on_end: Callable[[Job, Message], None]) -> None:
        self._process = process
        self._on_end = on_end
        self._queue: deque[Job] = deque()
        self._running: Job | None = None

    def submit(self, job: Job) -> None:
        """Queue a job."""
        self._queue.append(job)
        self._go_on()

    def _go_on(self) -> None:
        while self._running is None and self._queue:
            job = self._queue.popleft()
            if not job.cancelled:
                self._running = job
                job.begun = True
                self._wait(job)

    def _wait(self, job: Job) -> None:
        for blocker in job.waits_for:
            if not blocker.ended:
                blocker.then.append(partial(self._wait, job))
                return
        self._part(job, 0)

    def _part(self, job: Job, number: int) -> None:
        if number == len(job.parts) or (job.cancelled and job.stop_early):
            answer = job.answer()
            self._running = None
            self._on_end(job, answer)
            self._go_on()
            return
        delay = job.parts[number][0]
        if delay:
            self._process.later(delay, self._run, job, number)
        else:
            self._run(job, number)

    def _run(self, job: Job, number: int) -> None:
        job.parts[number][1]()  # a part that has begun can't be called back
        self._part(job, number + 1)
