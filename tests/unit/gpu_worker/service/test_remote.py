"""The remote data path where it differs from shared memory: the network, sessions, grants."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from services.gpu_worker import remote_link, remote_segment, transfers
from services.storage import page_server, page_server_requests
from services.storage.page_file import PageFormat
from services.storage.page_server import reachable
from shared.messages.common import Cancel, Cancelled, OperationFailed
from shared.messages.worker import LoadDone, MapSegment, SegmentMapped, WorkerHello, WriteDone
from shared.packed import pack
from tests.unit.gpu_worker.service.fake_scheduler import WAIT_S, Stack
from tests.unit.gpu_worker.service.gate import Gate


@pytest.fixture
def host_path() -> str:
    return "remote"


def hold_puts(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """The server puts no page until the event is set."""
    let_go = asyncio.Event()
    place = page_server.PageServer._place

    async def held(self: page_server.PageServer, *arguments) -> None:
        await let_go.wait()
        await place(self, *arguments)

    monkeypatch.setattr(page_server.PageServer, "_place", held)
    return let_go


async def test_a_write_of_many_windows_and_its_load(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_server, "WINDOW_BYTES", 0)  # two pages under way at most
    monkeypatch.setattr(remote_segment, "CHUNK_BYTES", 3 * stack.engine.geometry.page_bytes)
    await stack.rejoin()
    pages = list(range(1, 25))
    stack.fill(pages)
    await stack.back_up(pages, pages[::-1])
    assert isinstance(await stack.scheduler.ask(stack.load(pages, [page + 30 for page in pages])), LoadDone)
    assert all(stack.bytes_of(page + 30) == stack.bytes_of(25 - page) for page in pages)


async def test_a_buffer_is_filled_anew_only_when_its_pages_are_placed(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_segment, "CHUNK_BYTES", 1)  # one page to a buffer
    await stack.rejoin()
    let_go = hold_puts(monkeypatch)
    gate = Gate(monkeypatch, "worker_write", visit=0)  # counts only
    write = stack.write([1, 2, 3, 4], [5, 6, 7, 8])
    stack.scheduler.tell(write)
    assert await stack.scheduler.silence(write.op_id)
    assert gate.visits.count("worker_write") == remote_segment.BUFFERS
    let_go.set()
    assert isinstance(await stack.scheduler.answer(write.op_id), WriteDone)


async def test_a_page_that_arrives_damaged_fails_the_write(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    checksums_of = PageFormat.checksums_of
    arrived: list[None] = []

    def damaged(self: PageFormat, page: memoryview) -> np.ndarray:
        arrived.append(None)
        return checksums_of(self, page) ^ np.uint32(len(arrived) == 2)

    monkeypatch.setattr(PageFormat, "checksums_of", damaged)
    stack.fill([1, 2, 3])
    write = stack.write([1, 2, 3], [5, 6, 7])
    assert await stack.scheduler.ask(write) == OperationFailed(write.op_id, 0, "checksum", -1, pack([1]))
    assert not stack.segment.pages_array[6].any()
    assert isinstance(await stack.scheduler.ask(stack.write([1, 2, 3], [5, 6, 7])), WriteDone)


async def test_a_write_into_a_named_page_is_refused(stack: Stack) -> None:
    stack.fill([1, 2])
    await stack.back_up([1], [5])
    before = stack.segment.pages_array[5].copy()
    write = stack.write([1, 2], [6, 5])
    assert await stack.scheduler.ask(write) == OperationFailed(write.op_id, 0, "name", -1, pack([1]))
    assert (stack.segment.pages_array[5] == before).all()


async def test_a_silent_storage_fails_a_write_which_it_then_never_places(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_server_requests, "GRANT_S", 0.3)
    monkeypatch.setattr(page_server, "GRANT_S", 0.3)
    await stack.rejoin()
    let_go = hold_puts(monkeypatch)
    stack.fill([1])
    write = stack.write([1], [5])
    assert await stack.scheduler.ask(write) == OperationFailed(write.op_id, 0, "error", -1, b"")
    let_go.set()
    await asyncio.sleep(0.1)
    assert not stack.segment.pages_array[5].any()
    assert isinstance(await stack.scheduler.ask(stack.write([1], [5])), WriteDone)


async def test_a_cancelled_write_is_answered_when_the_storage_has_stopped(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "BATCH_BYTES", 1)  # a page in each copy call
    gate = Gate(monkeypatch, "worker_write", visit=2)
    scheduler = stack.scheduler
    stack.fill([1, 2, 3])
    write = stack.write([1, 2, 3], [5, 6, 7])
    scheduler.tell(write)
    assert await asyncio.to_thread(gate.reached.wait, WAIT_S)
    scheduler.tell(Cancel(scheduler.op(), write.op_id))
    assert await scheduler.silence(write.op_id)
    gate.open.set()
    assert await scheduler.answer(write.op_id) == Cancelled(write.op_id, 0, b"")
    assert not stack.segment.pages_array[5].any()
    assert not any(session.puts for session in stack.server._sessions.values())


async def test_a_silent_worker_is_revoked_and_joins_again_when_it_is_told_to(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    [holder] = stack.holders()
    monkeypatch.setattr(page_server, "SESSION_S", 0.0)
    async with asyncio.timeout(WAIT_S):
        while stack.holders():  # noqa: ASYNC110 - nobody is told
            await asyncio.sleep(0.02)
    monkeypatch.undo()
    stack.fill([1])
    write = stack.write([1], [5])
    assert (await stack.scheduler.ask(write)).reason == "error"
    assert not stack.segment.pages_array[5].any()
    await stack.rejoin()
    assert [replace(again, session=holder.session) for again in stack.holders()] == [holder]
    assert isinstance(await stack.scheduler.ask(stack.write([1], [5])), WriteDone)


async def test_a_worker_that_is_told_to_map_joins_again_though_it_heard_of_no_end(stack: Stack) -> None:
    [holder] = stack.holders()
    stack.server._sessions.clear()  # as after a silence of SESSION_S, which the worker learns with its next message
    mapped = await stack.scheduler.ask(MapSegment(stack.scheduler.op(), stack.info))
    assert stack.holders() == [replace(holder, session=mapped.session)]
    assert mapped.session > holder.session
    stack.fill([1])
    assert isinstance(await stack.scheduler.ask(stack.write([1], [5])), WriteDone)


async def test_a_worker_says_by_itself_that_its_session_has_ended_until_it_is_told_to_join(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_link, "TELL_AGAIN_S", 0.1)
    stack.server._sessions.clear()
    for _ in range(3):  # each may be lost
        hello = await stack.scheduler.receive(lambda message: isinstance(message, WorkerHello))
        assert hello.mapped == []
    await stack.rejoin()
    stack.scheduler.restart()
    assert (await stack.scheduler.welcome()).mapped == [stack.info.epoch]


async def test_without_an_endpoint_a_segment_that_cant_be_mapped_is_refused(stack: Stack) -> None:
    command = MapSegment(stack.scheduler.op(), replace(stack.info, pages_endpoint="", epoch=1))
    assert await stack.scheduler.ask(command) == OperationFailed(command.op_id, 0, "segment", -1, b"")


def test_workers_are_told_a_host_that_they_can_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "box")
    assert reachable("tcp://0.0.0.0:5701") == "tcp://box:5701"
    assert reachable("tcp://10.0.0.5:5701") == "tcp://10.0.0.5:5701"
    assert reachable("ipc:///run/pages.sock") == "ipc:///run/pages.sock"


class TestAuto:
    """worker.host_path = "auto"."""

    @pytest.fixture
    def host_path(self) -> str:
        return "auto"

    async def test_it_maps_what_it_can_and_joins_the_rest(self, stack: Stack, tmp_path: Path) -> None:
        assert stack.server.holders() == []
        hidden = replace(stack.info, path=str(tmp_path / "elsewhere"), storage_id="storage-1")
        assert isinstance(await stack.scheduler.ask(MapSegment(stack.scheduler.op(), hidden)), SegmentMapped)
        assert [holder.identity for holder in stack.server.holders()] == ["worker"]
