"""TIER-10, EVENT-01: which tier has which pages, told in the order in which it comes about."""

from services.scheduler.core.events import BlockRemoved, BlockStored, CacheEvent
from shared.messages.common import Message
from shared.messages.storage import ArchiveDone, ArchivePages, PagesDropped
from shared.packed import pack
from shared.page_hash import chain
from tests.conformance.harness import Harness

A = list(range(1, 9))


class Listener(Harness):
    """Keeps the events of every `handle`."""

    def __init__(self, **options: object) -> None:
        self.heard: list[CacheEvent] = []
        super().__init__(events=True, **options)  # type: ignore[arg-type]

    def feed(self, event: object) -> None:
        super().feed(event)  # type: ignore[arg-type]
        self.heard += self.core.events

    def told(self) -> list[tuple[str, str, int]]:
        """(what, medium, pages) since the last call."""
        told = [(type(event).__name__[5:], event.medium, len(event.digests)) for event in self.heard]
        self.heard.clear()
        return told


def test_tier_10_from_insert_to_l3() -> None:
    core = Listener(prefetch=False)
    core.submit([*A, 9])
    core.step_done()
    assert core.told() == [("Stored", "GPU", 4)]
    core.write_done()
    assert core.told() == []
    core.committed()
    assert core.told() == [("Stored", "CPU_PINNED", 4)]
    core.archived()
    assert core.told() == [("Stored", "EXTERNAL", 1)] * 4


def test_tier_10_stored_names_digests_tokens_and_the_page_before() -> None:
    core = Listener(host=0)
    core.compute(A[:5])
    core.compute([*A, 9])
    first, second = (event for event in core.heard if isinstance(event, BlockStored))
    digests = list(chain(b"", pack(A), 2))
    assert first == BlockStored(digests[:2], b"", pack(A[:4]), "GPU")
    assert second == BlockStored(digests[2:], digests[1], pack(A[4:]), "GPU")


def test_sc_31_a_demotion_is_no_loss_and_a_load_is_told() -> None:
    core = Listener(prefetch=False)
    core.compute([*A, 9])
    core.told()
    core.evict_device(4)
    removed = core.core.events  # the eviction itself happened outside of `handle`
    assert all(isinstance(event, BlockRemoved) for event in removed)
    core.heard.clear()
    core.submit([*A, 9])
    assert core.told() == [("Stored", "GPU", 4)]
    core.settle()
    assert core.match(A).device[0].host is not None


def test_tier_10_a_failed_load_is_told_at_once_though_its_pages_stay_locked() -> None:
    """They may be loaded anew before the last lock goes: told then, the loss would hide the second copy."""
    core = Listener(prefetch=False)
    core.compute([*A, 9])
    core.evict_device(4)
    core.submit([*A, 9])
    core.told()
    core.load_failed(reason="error")
    assert ("Removed", "GPU", 4) in core.told()
    core.step_failed("load")
    assert core.told()[0] == ("Stored", "GPU", 4)
    core.settle()
    core.nothing_left()


def test_tier_10_an_eviction_for_another_request_is_told_before_its_pages_are_stored() -> None:
    core = Listener(prefetch=False, device=6)
    core.compute([*A, 9])
    core.told()
    core.compute(range(40, 49))
    kinds = [(what, medium) for what, medium, _ in core.told()]
    assert kinds.index(("Removed", "GPU")) < kinds.index(("Stored", "GPU"))
    assert ("Removed", "CPU_PINNED") not in kinds


def test_tier_10_host_pages_that_go_and_a_prefetch_are_told() -> None:
    core = Listener()
    core.submit([*A, 9])
    core.found(4)
    core.prefetch_done(0, 1, 2)
    assert core.told()[0] == ("Stored", "CPU_PINNED", 3)
    core.settle()
    core.lose(core.storage)
    core.told()
    core.restart_storage()
    assert {told[:2] for told in core.told()} == {("Removed", "CPU_PINNED")}


def test_tier_10_a_page_that_the_quota_takes_is_told_once() -> None:
    core = Listener(prefetch=False)
    core.compute([*A, 9])
    core.told()
    dropped: Message = PagesDropped(b"".join(list(chain(b"", pack(A), 2))[2:]))
    core.answer(core.storage, dropped)
    assert core.told() == [("Removed", "EXTERNAL", 1)] * 2
    core.answer(core.storage, dropped)
    assert core.told() == []


def test_tier_10_a_message_that_names_a_dropped_page_twice_tells_it_once() -> None:
    core = Listener(prefetch=False)
    core.compute([*A, 9])
    core.told()
    page = list(chain(b"", pack(A), 2))[3]
    core.answer(core.storage, PagesDropped(2 * page))
    assert core.told() == [("Removed", "EXTERNAL", 1)]


def test_tier_10_an_archive_s_answer_that_comes_after_its_pages_were_dropped_stores_nothing() -> None:
    core = Listener(prefetch=False)
    core.submit([*A, 9])
    core.settle(ArchivePages)
    core.told()
    archive = core.take(ArchivePages)
    core.answer(core.storage, PagesDropped(list(chain(b"", pack(A), 2))[3]))
    core.answer(core.storage, ArchiveDone(archive.op_id, pack(range(4)), 0.0))
    assert core.told() == [("Stored", "EXTERNAL", 1)] * 3


def test_event_01_nothing_is_collected_unless_somebody_listens() -> None:
    core = Harness()
    core.compute([*A, 9])
    assert core.core.events == []
    assert core.core.state.published is None
