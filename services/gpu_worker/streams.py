"""Streams and events: ordered work beside the event loop.

A stream runs its work in order and one at a time; two streams run side by side; an event is a point in a stream's
work that others wait for. On a CPU a stream is a thread with a queue. It is CUDA's model, so that overlap,
cancellation and failure are the same on a laptop. `open_stream` chooses by the device.
"""

import importlib
import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

from shared.errors import CapacityError, ConfigError, KvtideError

QUEUED_WORK = 64  # pieces that wait in one stream: twice the worker's credits, so that it never fills in good order

Work = Callable[[], None]

log = logging.getLogger("kvtide.streams")


class StreamClosed(KvtideError):
    """The stream was closed before the work began."""


class Event(ABC):
    """A point in a stream's work. It is reached or it failed, once: the first outcome stays."""

    @abstractmethod
    def record(self) -> None:
        """Called by work on a stream: all that the stream did so far is what waiters wait for."""

    @abstractmethod
    def set_error(self, error: Exception) -> None:
        """The point will not be reached; waiters raise `error`."""

    @abstractmethod
    def query(self) -> bool:
        """True once the point is reached or failed."""

    @abstractmethod
    def wait(self, timeout_s: float) -> None:
        """Return when the point is reached. Raises the error that was set, TimeoutError after `timeout_s`."""


class Stream(ABC):
    """Work in order. `submit` may be called from any thread."""

    @abstractmethod
    def event(self) -> Event:
        """A new event for work on this stream to record."""

    @abstractmethod
    def submit(self, work: Work) -> Event:
        """Queue `work`; the event is reached when it returns and fails with what it raises.

        Raises CapacityError when QUEUED_WORK pieces wait already, StreamClosed after `close`.
        """

    @abstractmethod
    def query(self) -> bool:
        """True when all submitted work has ended."""

    @abstractmethod
    def close(self, timeout_s: float) -> bool:
        """Drop what has not begun (its events fail with StreamClosed) and wait for the rest. False when it still runs
        after `timeout_s`: then the memory that it uses must stay."""


def open_stream(name: str, device: str) -> Stream:
    """A stream of that name for tensors on `device`: "cpu", "cuda" or "cuda:N".

    Raises ConfigError for a device that isn't there.
    """
    kind = device.partition(":")[0]
    if kind == "cuda":
        stream: Stream = importlib.import_module("services.gpu_worker.cuda_streams").CudaStream(name, device)
        return stream
    if kind != "cpu":
        raise ConfigError(f"device {device!r} has no streams here; use 'cpu' or 'cuda'")
    return CpuStream(name)


class CpuEvent(Event):
    """An event between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._error: Exception | None = None

    def record(self) -> None:
        with self._lock:
            self._ended.set()

    def set_error(self, error: Exception) -> None:
        with self._lock:
            if not self._ended.is_set():
                self._error = error
                self._ended.set()

    def query(self) -> bool:
        return self._ended.is_set()

    def wait(self, timeout_s: float) -> None:
        if not self._ended.wait(timeout_s):
            raise TimeoutError(f"an event was not reached within {timeout_s:.1f} s")
        if self._error is not None:
            raise self._error


class CpuStream(Stream):
    """One thread and its queue."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Work, CpuEvent]] = deque()
        self._closed = False
        self._last = CpuEvent()
        self._last.record()
        self._thread = threading.Thread(target=self._run, name=f"stream-{name}", daemon=True)
        self._thread.start()

    def event(self) -> CpuEvent:
        return CpuEvent()

    def submit(self, work: Work) -> CpuEvent:
        done = CpuEvent()
        with self._changed:
            if self._closed:
                raise StreamClosed(f"stream {self.name} is closed")
            if len(self._waiting) >= QUEUED_WORK:
                raise CapacityError(f"stream {self.name} has {QUEUED_WORK} pieces waiting; send fewer at once")
            self._waiting.append((work, done))
            self._last = done
            self._changed.notify()
        return done

    def query(self) -> bool:
        return self._last.query()

    def close(self, timeout_s: float) -> bool:
        with self._changed:
            self._closed = True
            dropped = list(self._waiting)
            self._waiting.clear()
            self._changed.notify()
        for _, done in dropped:
            done.set_error(StreamClosed(f"stream {self.name} was closed"))
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                work, done = self._waiting.popleft()
            try:
                work()
            except Exception as error:
                log.warning("work_failed stream=%s error=%r", self.name, error)
                done.set_error(error)
            else:
                done.record()
