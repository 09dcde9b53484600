"""A new scheduler takes over the named pages of the one before it."""

from shared.messages.common import OperationFailed
from shared.messages.storage import Adopted, AdoptPages, Committed, Inventory, ListPages
from shared.packed import pack, unpack
from tests.unit.storage.pages import Page
from tests.unit.storage.service.conftest import POOL_PAGES, Stack


async def named(stack: Stack, pages: list[int], numbers: list[int]) -> None:
    stack.fill(pages, numbers)
    assert isinstance(await stack.scheduler.ask(stack.scheduler.commit(pages, numbers)), Committed)


async def listed(stack: Stack, first: int, count: int) -> tuple[list[int], bytes]:
    scheduler = stack.scheduler
    assert scheduler.segment is not None
    answer = await scheduler.ask(ListPages(scheduler.op(), scheduler.segment.epoch, first, count))
    assert isinstance(answer, Inventory)
    return unpack(answer.pages).tolist(), answer.digests


def adopt(stack: Stack, pages: list[int], numbers: list[int]) -> AdoptPages:
    scheduler = stack.scheduler
    assert scheduler.segment is not None
    digests = b"".join(Page(number).digest for number in numbers)
    return AdoptPages(scheduler.op(), scheduler.segment.epoch, pack(pages), digests)


async def test_a_new_scheduler_finds_the_names_of_the_old_one_longest_unused_first(stack: Stack) -> None:
    await named(stack, [9], [0])
    await named(stack, [4, 6], [1, 2])
    await stack.scheduler.ask(adopt(stack, [9], [0]))
    await stack.scheduler.restart()
    pages, digests = await listed(stack, 1, POOL_PAGES - 1)
    assert pages == [4, 6, 9]
    assert digests == b"".join(Page(number).digest for number in (1, 2, 0))


async def test_a_part_of_the_segment_is_listed_alone(stack: Stack) -> None:
    await named(stack, [2, 3, 8], [0, 1, 2])
    assert (await listed(stack, 3, 5))[0] == [3]
    assert (await listed(stack, 4, 4))[0] == []
    assert (await listed(stack, 8, 10**6))[0] == [8]


async def test_only_a_page_that_still_has_the_name_is_adopted(stack: Stack) -> None:
    await named(stack, [2, 3, 4], [0, 1, 2])
    await stack.scheduler.ask(stack.scheduler.release([3]))
    answer = await stack.scheduler.ask(adopt(stack, [2, 3, 4], [0, 1, 7]))
    assert isinstance(answer, Adopted)
    assert unpack(answer.named).tolist() == [0]


async def test_a_part_outside_the_segment_is_refused(stack: Stack) -> None:
    scheduler = stack.scheduler
    assert scheduler.segment is not None
    answer = await scheduler.ask(ListPages(scheduler.op(), scheduler.segment.epoch, POOL_PAGES, 3))
    assert isinstance(answer, OperationFailed)
