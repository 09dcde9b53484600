"""Streams and events of a GPU, behind the interface of `streams`. Imported where `open_stream` is asked for one.

Work runs on a thread, which queues copies and kernels on a CUDA stream and doesn't wait for them; the work's event is
reached when the GPU has done them. `wait` holds the waiter's thread, not its CUDA stream: what comes next may be work
of the host, as a checksum is.
"""

import time

import torch

from services.gpu_worker.streams import CpuEvent, CpuStream, Event, Stream, Work
from shared.errors import ConfigError

POLL_S = 20e-6  # between looks at an event: CUDA's own wait knows no deadline


def cuda_device(name: str) -> torch.device:
    """The GPU of that name ("cuda", "cuda:1"). Raises ConfigError when it isn't there."""
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device {name!r}: torch {torch.__version__} sees no CUDA GPU; use 'cpu', or a build of torch for CUDA and "
            "a driver"
        )
    device = torch.device(name)
    if (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {name!r}: there are {torch.cuda.device_count()} GPUs; count from cuda:0")
    return device


class CudaEvent(Event):
    """A point in what a thread queued on its CUDA stream: first the thread must get there, then the GPU."""

    def __init__(self, queued: CpuEvent, done: torch.cuda.Event) -> None:
        """queued: reached when `done` has been recorded, or failed."""
        self._queued, self._done = queued, done

    def record(self) -> None:
        """On the current CUDA stream of the calling thread."""
        if not self._queued.query():
            self._done.record()
            self._queued.record()

    def set_error(self, error: Exception) -> None:
        self._queued.set_error(error)

    def query(self) -> bool:
        return self._queued.query() and self._done.query()

    def wait(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        try:
            self._queued.wait(timeout_s)
        finally:  # where it failed, too: what it had queued may still write
            if not _reached(self._done, deadline_s):
                raise TimeoutError(f"the GPU did not reach an event within {timeout_s:.1f} s")


class CudaStream(Stream):
    """One thread with its queue, and the CUDA stream on which its work queues."""

    def __init__(self, name: str, device: str) -> None:
        """Raises ConfigError without that GPU."""
        self._stream = torch.cuda.Stream(cuda_device(device))
        self._thread = CpuStream(name)

    def event(self) -> CudaEvent:
        return CudaEvent(CpuEvent(), torch.cuda.Event())

    def submit(self, work: Work) -> CudaEvent:
        done = torch.cuda.Event()

        def queue() -> None:
            with torch.cuda.stream(self._stream):
                try:
                    work()
                finally:
                    done.record()

        return CudaEvent(self._thread.submit(queue), done)

    def query(self) -> bool:
        return self._thread.query() and self._stream.query()

    def close(self, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        return self._thread.close(timeout_s) and _reached(self._stream, deadline_s)


def _reached(what: torch.cuda.Event | torch.cuda.Stream, deadline_s: float) -> bool:
    while not what.query():
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(POLL_S)
    return True
