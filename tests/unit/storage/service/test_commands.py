"""What the service does with each command."""

import asyncio

import numpy as np
import pytest
from msgspec.structs import replace

from services.storage.disk_index import PageKey
from services.storage.hash_file import HashFileBackend, model_name
from services.storage.page_file import PageFormat
from services.storage.test_hooks import FAIL_WRITE
from shared.config import Config
from shared.messages.common import Heartbeat, Missed, OperationFailed
from shared.messages.storage import (
    ArchiveDone,
    BackendChanged,
    ChangeBackend,
    CommitPages,
    Committed,
    Found,
    PagesDropped,
    PrefetchDone,
    PrefetchPages,
    PrefetchProgress,
    Released,
    ReleasePages,
    SegmentOpened,
)
from shared.op_log import KEPT_RESULTS
from shared.packed import pack, unpack
from tests.unit.storage.fake_scheduler import FakeScheduler
from tests.unit.storage.pages import GEOMETRY, MODEL, Page, page_files, put
from tests.unit.storage.service.conftest import POOL_PAGES, Stack, running


def positions(data: bytes) -> list[int]:
    return unpack(data).tolist()


async def archived(stack: Stack, numbers: list[int]) -> None:
    """Bring content into L3 and take it out of the pool again."""
    pages = [10 + n for n in numbers]
    stack.fill(pages, numbers)
    assert isinstance(await stack.scheduler.ask(stack.scheduler.commit(pages, numbers)), Committed)
    done = await stack.scheduler.ask(stack.scheduler.archive(pages, numbers))
    assert positions(done.stored) == list(range(len(numbers)))
    assert isinstance(await stack.scheduler.ask(stack.scheduler.release(pages)), Released)
    for page in pages:
        stack.worker.host_pages.put(page, np.zeros(GEOMETRY.page_bytes, np.uint8))


async def test_hello_tells_backend_budget_and_no_segment(stack: Stack) -> None:
    hello = stack.hello
    assert hello.identity == "storage-0"
    assert hello.segment is None
    assert hello.holders == []
    assert hello.budget == POOL_PAGES * GEOMETRY.page_bytes + 1
    assert (hello.backend.kind, hello.credits) == ("hash_file", 64)


async def test_host_02_an_open_segment_has_all_pages_that_fit_but_the_headers(stack: Stack) -> None:
    info = stack.scheduler.segment
    assert info is not None
    assert (info.pages, info.first_page, info.page_count) == (POOL_PAGES, 1, POOL_PAGES - 1)
    assert (info.geometry, info.model_fingerprint, info.storage_id) == (GEOMETRY, MODEL, "storage-0")
    again = await stack.scheduler.open()
    assert isinstance(again, SegmentOpened)
    assert again.segment == info


async def test_names_come_with_commit_and_go_with_release(stack: Stack) -> None:
    scheduler = stack.scheduler
    stack.fill([3, 5], [0, 1])
    assert isinstance(await scheduler.ask(scheduler.commit([3, 5], [0, 1])), Committed)
    assert stack.holds(3, 0)
    assert stack.holds(5, 1)
    assert isinstance(await scheduler.ask(scheduler.release([5, 6])), Released)
    assert stack.holds(3, 0)
    assert stack.worker.name_of(5) is None


async def test_a_commit_of_a_page_with_another_name_is_refused_as_a_whole(stack: Stack) -> None:
    scheduler = stack.scheduler
    await scheduler.ask(scheduler.commit([3], [0]))
    failed = await scheduler.ask(scheduler.commit([2, 3], [1, 2]))
    assert isinstance(failed, OperationFailed)
    assert (failed.reason, positions(failed.positions)) == ("name", [1])
    assert stack.worker.name_of(2) is None
    assert isinstance(await scheduler.ask(scheduler.commit([3], [0])), Committed)


@pytest.mark.parametrize(
    ("pages", "digests", "checksums"),
    [
        ([1, 2], b"d" * 32, b"c" * 32),  # a digest short
        ([1, 1], b"d" * 64, b"c" * 32),  # a page twice
        ([0], b"d" * 32, b"c" * 16),  # the header's page
        ([POOL_PAGES], b"d" * 32, b"c" * 16),  # beyond the end
        ([1], b"d" * 32, b"c" * 15),  # a checksum short
        ([1], b"d" * 33, b"c" * 16),
    ],
)
async def test_a_malformed_commit_is_refused_and_names_nothing(
    stack: Stack, pages: list[int], digests: bytes, checksums: bytes
) -> None:
    scheduler = stack.scheduler
    assert scheduler.segment is not None
    failed = await scheduler.ask(CommitPages(scheduler.op(), scheduler.segment.epoch, pack(pages), digests, checksums))
    assert isinstance(failed, OperationFailed)
    assert failed.reason == "error"
    assert stack.service.leases[0].stats()["host_pages_named"] == 0


async def test_a_command_for_another_segment_is_refused(stack: Stack) -> None:
    scheduler = stack.scheduler
    for message in (
        CommitPages(scheduler.op(), 1, pack([1]), b"d" * 32, b"c" * 16),
        ReleasePages(scheduler.op(), 1, pack([1])),
        PrefetchPages(scheduler.op(), 1, pack([1]), b"d" * 32),
    ):
        failed = await scheduler.ask(message)
        assert isinstance(failed, OperationFailed)
        assert failed.reason == "segment"


@pytest.mark.parametrize("layout", ["page_first_direct", "layer_first"])  # in one place, and in many
async def test_store_06_what_was_archived_is_found_and_prefetched(stack: Stack) -> None:
    scheduler = stack.scheduler
    numbers = list(range(20))
    await archived(stack, numbers)
    assert await scheduler.ask(scheduler.find([*numbers, 99])) == Found(scheduler._op_id, 20)
    assert (await scheduler.ask(scheduler.find([99, *numbers]))).hits == 0

    pages = [40 - n for n in numbers]
    request = scheduler.tell(scheduler.prefetch(pages, numbers))
    heard = []
    while not isinstance(heard[-1] if heard else None, PrefetchDone):
        heard.append(await scheduler.answer(request.op_id))
    assert [positions(each.named) for each in heard] == [list(range(end)) for end in (8, 16, 20, 20)]
    assert all(isinstance(each, PrefetchProgress) for each in heard[:-1])
    assert heard[-1].corrupt == 0
    assert all(stack.holds(page, n) for page, n in zip(pages, numbers, strict=True))


@pytest.mark.parametrize("layout", ["page_first_direct", "layer_first"])  # in one place, and in many
async def test_store_06_a_prefetch_takes_what_is_there_around_gaps_and_bad_pages(stack: Stack) -> None:
    scheduler = stack.scheduler
    await archived(stack, [0, 1, 2])
    path = next(each for each in page_files(stack.service.backend.inner.folder) if each.stat())
    digest = bytes.fromhex(path.stem)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    request = scheduler.tell(scheduler.prefetch([1, 2, 3, 4], [0, 99, 1, 2]))
    done = await scheduler.receive(lambda message: isinstance(message, PrefetchDone))
    bad = next(n for n in range(3) if digest == bytes(scheduler.find([n]).digests))
    left = [position for position, n in enumerate([0, 99, 1, 2]) if n not in (99, bad)]
    assert (done.op_id, positions(done.named), done.corrupt) == (request.op_id, left, 1)
    assert [stack.worker.name_of(page) is not None for page in (1, 2, 3, 4)] == [each in left for each in range(4)]


async def test_a_prefetch_into_a_named_page_is_refused(stack: Stack) -> None:
    scheduler = stack.scheduler
    await archived(stack, [0, 1])
    stack.fill([2], [5])
    await scheduler.ask(scheduler.commit([2], [5]))
    failed = await scheduler.ask(scheduler.prefetch([1, 2], [0, 1]))
    assert isinstance(failed, OperationFailed)
    assert (failed.reason, positions(failed.positions)) == ("name", [1])
    assert stack.holds(2, 5)
    assert stack.worker.name_of(1) is None


async def test_store_05_only_pages_with_the_name_given_are_archived(stack: Stack) -> None:
    scheduler = stack.scheduler
    stack.fill([1, 2, 3], [0, 1, 2])
    await scheduler.ask(scheduler.commit([1, 2], [0, 1]))
    done = await scheduler.ask(scheduler.archive([1, 2, 3], [0, 9, 2]))
    assert isinstance(done, ArchiveDone)
    assert positions(done.stored) == [0]
    assert positions((await scheduler.ask(scheduler.archive([2, 1], [1, 0]))).stored) == [0, 1]
    assert stack.service.leases[0].stats()["l3_set_pages"] == 2


async def test_store_05_a_full_disk_drops_the_write_and_counts_it(stack: Stack, hooks) -> None:
    scheduler = stack.scheduler
    (hooks / FAIL_WRITE).touch()
    stack.fill([1], [0])
    await scheduler.ask(scheduler.commit([1], [0]))
    assert positions((await scheduler.ask(scheduler.archive([1], [0]))).stored) == []
    assert stack.service.leases[0].stats()["l3_dropped"] == 1
    (hooks / FAIL_WRITE).unlink()
    assert positions((await scheduler.ask(scheduler.archive([1], [0]))).stored) == [0]


async def test_store_07_l3_is_detached_attached_and_cleared_by_hand(stack: Stack) -> None:
    scheduler, stats = stack.scheduler, stack.service.leases[0].stats
    stack.fill([1, 2], [0, 1])
    await scheduler.ask(scheduler.commit([1, 2], [0, 1]))

    async def change(what: str) -> str:
        answer = await scheduler.ask(ChangeBackend(scheduler.op(), what))
        assert isinstance(answer, BackendChanged)
        return answer.refusal

    assert positions((await scheduler.ask(scheduler.archive([1], [0]))).stored) == [0]
    for _ in range(2):  # a command may come twice
        assert await change("detach") == ""
    await stack.service.backend.refresh()  # doesn't attach it: only a person does
    assert stats()["l3_attached"] == 0
    assert (await scheduler.ask(scheduler.find([0]))).hits == 0
    assert positions((await scheduler.ask(scheduler.archive([2], [1]))).stored) == []
    for _ in range(2):
        assert await change("attach") == ""
    assert (await scheduler.ask(scheduler.find([0]))).hits == 1
    assert await change("clear") == ""
    assert (await scheduler.ask(scheduler.find([0]))).hits == 0
    assert stats()["l3_files"] == 0
    assert positions((await scheduler.ask(scheduler.archive([1, 2], [0, 1]))).stored) == [0, 1]


async def test_without_an_l3_there_is_nothing_to_detach(config: Config, scheduler: FakeScheduler) -> None:
    async with running(replace(config, storage=replace(config.storage, backend="none"))):
        await scheduler.welcome()
        for what in ("attach", "detach"):
            answer = await scheduler.ask(ChangeBackend(scheduler.op(), what))
            assert "storage.backend is none" in answer.refusal
        assert (await scheduler.ask(ChangeBackend(scheduler.op(), "clear"))).refusal == ""


async def test_a_repeated_op_id_is_answered_and_not_done_again(stack: Stack) -> None:
    scheduler = stack.scheduler
    stack.fill([1], [0])
    message = scheduler.commit([1], [0])
    first = await scheduler.ask(message)
    await scheduler.ask(scheduler.release([1]))
    assert await scheduler.ask(message) == first
    assert stack.worker.name_of(1) is None


async def test_an_op_id_older_than_what_is_kept_is_stale(stack: Stack) -> None:
    scheduler = stack.scheduler
    old = scheduler.tell(scheduler.find([0]))
    await scheduler.answer(old.op_id)
    for _ in range(KEPT_RESULTS + 1):
        last = scheduler.tell(scheduler.find([0]))
    await scheduler.answer(last.op_id)
    failed = await scheduler.ask(old)
    assert isinstance(failed, OperationFailed)
    assert failed.reason == "stale"


async def test_the_heartbeat_carries_numbers(stack: Stack) -> None:
    await archived(stack, [0, 1])
    await stack.scheduler.ask(stack.scheduler.commit([1], [0]))
    beat = await stack.scheduler.receive(
        lambda message: isinstance(message, Heartbeat) and message.stats["l3_set_pages"] == 2, timeout_s=8
    )
    assert beat.stats["host_bytes"] == POOL_PAGES * GEOMETRY.page_bytes
    assert beat.stats["l3_files"] == 2
    assert {"l3_bytes", "l3_quota_bytes", "l3_get_pages", "l3_miss", "l3_corrupt", "l3_evicted"} <= beat.stats.keys()


async def test_store_04_another_storages_pages_are_found_within_5_s(stack: Stack, tmp_path) -> None:
    other = HashFileBackend(tmp_path / "l3", 2**30, 0, 1)
    await other.start()
    await put(await other.of_model(MODEL, GEOMETRY), 77)
    await other.close()
    for _ in range(25):
        if (await stack.scheduler.ask(stack.scheduler.find([77]))).hits:
            return
        await asyncio.sleep(0.2)
    pytest.fail("not seen within 5 s")


async def test_tier_10_pages_that_l3_has_lost_are_told(stack: Stack) -> None:
    scheduler = stack.scheduler
    await archived(stack, [0, 1])
    store = stack.service.backend.inner
    oldest = store.index.oldest()  # of two that were written side by side
    store.room.remove(oldest)  # as the quota does
    told = await scheduler.receive(lambda message: isinstance(message, PagesDropped))
    assert told.digests == oldest.digest


async def test_tier_10_pages_that_l3_has_lost_are_told_again_when_messages_were_missed(stack: Stack) -> None:
    scheduler = stack.scheduler
    await archived(stack, [0, 1])
    store = stack.service.backend.inner
    for n in range(2):
        store.room.remove(PageKey(model_name(MODEL), Page(n).digest))
        told = await scheduler.receive(lambda message: isinstance(message, PagesDropped))
        assert told.digests == Page(n).digest
    await archived(stack, [1])  # it is there again
    scheduler.tell(Missed())
    told = await scheduler.receive(lambda message: isinstance(message, PagesDropped))
    assert told.digests == Page(0).digest


async def test_tier_10_a_page_that_the_quota_took_before_the_archive_s_end_is_not_told_as_stored(stack: Stack) -> None:
    scheduler, numbers = stack.scheduler, list(range(12))  # two batches
    pages = [1 + n for n in numbers]
    stack.fill(pages, numbers)
    await scheduler.ask(scheduler.commit(pages, numbers))
    room = stack.service.backend.inner.room
    room._quota = 10 * PageFormat(MODEL, GEOMETRY).file_bytes
    done = await scheduler.ask(scheduler.archive(pages, numbers))
    assert len(positions(done.stored)) == 10
    assert {8, 9, 10, 11} < set(positions(done.stored))
