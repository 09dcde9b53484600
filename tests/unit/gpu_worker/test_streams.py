"""One suite for every implementation of Stream."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from services.gpu_worker.pinned import Pinned
from services.gpu_worker.streams import QUEUED_WORK, CpuStream, Stream, StreamClosed, open_stream
from shared.errors import CapacityError, ConfigError

WAIT_S = 10.0  # far above what any of this takes
HAS_GPU = torch.cuda.is_available()


@pytest.fixture(params=["cpu", "cuda"] if HAS_GPU else ["cpu"])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def stream(device: str) -> Iterator[Stream]:
    stream = open_stream("test", device)
    yield stream
    assert stream.close(WAIT_S)


@pytest.fixture
def other(device: str) -> Iterator[Stream]:
    stream = open_stream("other", device)
    yield stream
    assert stream.close(WAIT_S)


def test_the_device_chooses_the_stream() -> None:
    stream = open_stream("chosen", "cpu")
    assert isinstance(stream, CpuStream)
    assert stream.close(WAIT_S)
    with pytest.raises(ConfigError, match="'tpu' has no streams here; use 'cpu' or 'cuda'"):
        open_stream("test", "tpu")


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU")
def test_without_a_gpu_its_streams_and_pinned_memory_are_refused() -> None:
    before = threading.active_count()
    with pytest.raises(ConfigError, match=r"'cuda:1': torch .* sees no CUDA GPU; use 'cpu'"):
        open_stream("test", "cuda:1")
    assert threading.active_count() == before
    with pytest.raises(ConfigError, match="sees no CUDA GPU"):
        Pinned(np.zeros(4096, np.uint8))


def test_work_runs_in_the_order_of_submission(stream: Stream) -> None:
    order: list[int] = []
    events = [stream.submit(lambda n=n: order.append(n)) for n in range(20)]
    events[-1].wait(WAIT_S)
    assert order == list(range(20))
    assert all(event.query() for event in events)


def test_an_event_is_reached_when_its_work_has_ended(stream: Stream) -> None:
    gate = threading.Event()
    event = stream.submit(lambda: _pass(gate))
    assert not event.query()
    with pytest.raises(TimeoutError, match="not reached"):
        event.wait(0.01)
    gate.set()
    event.wait(WAIT_S)
    assert event.query()


def test_work_records_events_before_its_end(stream: Stream) -> None:
    gate, half = threading.Event(), stream.event()

    def work() -> None:
        half.record()
        _pass(gate)

    whole = stream.submit(work)
    half.wait(WAIT_S)
    assert not whole.query()
    gate.set()
    whole.wait(WAIT_S)


def test_two_streams_run_side_by_side(stream: Stream, other: Stream) -> None:
    first, second = stream.event(), other.event()

    def ping() -> None:
        first.record()
        second.wait(WAIT_S)

    def pong() -> None:
        first.wait(WAIT_S)
        second.record()

    for event in (stream.submit(ping), other.submit(pong)):
        event.wait(WAIT_S)


def test_failed_work_fails_its_event_and_not_the_next(stream: Stream) -> None:
    def fail() -> None:
        raise ValueError("on purpose")

    failed, after = stream.submit(fail), stream.submit(lambda: None)
    for _ in range(2):
        with pytest.raises(ValueError, match="on purpose"):
            failed.wait(WAIT_S)
    assert failed.query()
    after.wait(WAIT_S)


def test_an_error_reaches_work_that_waits_on_another_stream(stream: Stream, other: Stream) -> None:
    event = stream.event()
    waiter = other.submit(lambda: event.wait(WAIT_S))
    event.set_error(KeyError("on purpose"))
    with pytest.raises(KeyError):
        waiter.wait(WAIT_S)


def test_the_first_outcome_of_an_event_stays(stream: Stream) -> None:
    reached, failed = stream.event(), stream.event()
    reached.record()
    reached.set_error(KeyError())
    reached.wait(0)
    failed.set_error(KeyError())
    failed.record()
    with pytest.raises(KeyError):
        failed.wait(0)


def test_query_tells_whether_work_is_left(stream: Stream) -> None:
    assert stream.query()
    gate = threading.Event()
    event = stream.submit(lambda: _pass(gate))
    assert not stream.query()
    gate.set()
    event.wait(WAIT_S)
    assert stream.query()


def test_a_full_stream_refuses_work(stream: Stream) -> None:
    gate, begun = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        _pass(gate)

    stream.submit(hold)
    assert begun.wait(WAIT_S)
    for _ in range(QUEUED_WORK):
        last = stream.submit(lambda: None)
    with pytest.raises(CapacityError, match=str(QUEUED_WORK)):
        stream.submit(lambda: None)
    gate.set()
    last.wait(WAIT_S)


def test_close_drops_what_waits_and_tells_whether_the_rest_has_ended(stream: Stream) -> None:
    gate, begun = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        _pass(gate)

    running, waiting = stream.submit(hold), stream.submit(lambda: None)
    assert begun.wait(WAIT_S)
    assert not stream.close(0.01)
    with pytest.raises(StreamClosed):
        waiting.wait(WAIT_S)
    with pytest.raises(StreamClosed):
        stream.submit(lambda: None)
    gate.set()
    running.wait(WAIT_S)
    assert stream.close(WAIT_S)


def _pass(gate: threading.Event) -> None:
    if not gate.wait(WAIT_S):
        raise TimeoutError
