"""A storage that several schedulers share: each identity has its range, and one process of an identity leads."""

import asyncio
from collections.abc import Iterator

import pytest

from shared import link
from shared.config import Config
from shared.messages.common import Heartbeat, OperationFailed
from shared.messages.storage import Committed, OpenSegment, SegmentOpened, Superseded
from tests.unit.storage.fake_scheduler import FakeScheduler
from tests.unit.storage.pages import GEOMETRY, MODEL
from tests.unit.storage.service.conftest import POOL_PAGES, running

BEAT_S = 0.05


@pytest.fixture
def endpoints(config: Config) -> list[str]:
    return [f"ipc://{config.run_folder}/{name}.sock" for name in ("one", "two")]


@pytest.fixture
def pair(endpoints: list[str]) -> Iterator[list[FakeScheduler]]:
    schedulers = [FakeScheduler(each) for each in endpoints]
    yield schedulers
    for each in schedulers:
        each.close()


def shared(config: Config, endpoints: list[str], *identities: str) -> Config:
    schedulers = tuple(f"{name}@{each}" for name, each in zip(identities, endpoints, strict=True))
    storage = type(config.storage)(**{**_fields(config.storage), "schedulers": schedulers})
    return type(config)(**{**_fields(config), "storage": storage})


def _fields(section: object) -> dict[str, object]:
    return {name: getattr(section, name) for name in section.__struct_fields__}  # type: ignore[attr-defined]


async def test_two_identities_have_a_range_each_and_see_nothing_of_one_another(
    config: Config, endpoints: list[str], pair: list[FakeScheduler]
) -> None:
    async with running(shared(config, endpoints, "a", "b")):
        for name, each in zip("ab", pair, strict=True):
            await each.welcome(name)
            opened = await each.open()
            assert opened.segment.page_count == POOL_PAGES // 2 - 1
        first, second = pair
        assert first.segment is not None
        assert second.segment is not None
        assert first.segment.path != second.segment.path
        assert await first.ask(first.commit([3], [1])) == Committed(first._op_id)
        assert (await second.ask(second.archive([3], [1]))).stored == b""  # it has no page of that name
        assert (await second.open(fresh=True)).segment.epoch != first.segment.epoch
        assert (await first.ask(first.archive([3], [1]))).stored != b""


async def test_a_second_scheduler_of_an_identity_is_refused_while_the_first_is_heard(
    config: Config, endpoints: list[str], pair: list[FakeScheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = pair
    monkeypatch.setattr(link, "RECONNECT_S", 600.0)  # a fake scheduler can't be told while its peer makes a new socket
    async with running(shared(config, endpoints, "a", "a")) as service:
        await first.welcome("a")
        opened = await first.open()
        await second.welcome("a")
        request = second.tell(OpenSegment(second.op(), GEOMETRY, MODEL, False))
        assert await second.silence(request.op_id)
        assert service.leases[0].leader is service.leases[0].branches[0]
        # 2. The first one falls silent: the second gets its lease, with the segment as it is.
        first.tell(Heartbeat(BEAT_S, {}))
        await asyncio.sleep(link.MISSED_BEATS * BEAT_S)
        monkeypatch.setattr(service.leases[0].branches[0].link, "_heard_s", 0.0)
        service.leases[0].branches[0].link.quicken()
        while service.leases[0].leader is service.leases[0].branches[0]:
            await second.welcome("a")
        while (await second.welcome("a")).segment != opened.segment:  # older hellos are still on their way
            pass
        answer = await second.open()
        assert answer == SegmentOpened(answer.op_id, opened.segment)
        # 3. The first one hears of it, and again whenever it commands.
        superseded = Superseded(second.epoch)
        assert await first.receive(lambda message: isinstance(message, Superseded)) == superseded
        first.tell(first.commit([3], [1]))
        assert await first.receive(lambda message: isinstance(message, Superseded)) == superseded
        assert not isinstance(await second.ask(second.commit([3], [1])), OperationFailed)


async def test_a_scheduler_of_another_identity_than_configured_does_not_lead(
    config: Config, endpoints: list[str], pair: list[FakeScheduler]
) -> None:
    async with running(shared(config, endpoints, "a", "b")) as service:
        await pair[0].welcome("b")
        request = pair[0].tell(OpenSegment(pair[0].op(), GEOMETRY, MODEL, False))
        assert await pair[0].silence(request.op_id)
        assert service.leases[0].leader is None
