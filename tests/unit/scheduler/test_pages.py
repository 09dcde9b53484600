"""Page pools: allocation by example, and against a naive model."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.pages import HostPool, PagePool
from shared.errors import IntegrityError


def test_a_pool_hands_out_each_page_once_and_never_page_0() -> None:
    pool = PagePool(1, 5)
    pages = pool.alloc(5)
    assert pages is not None
    assert sorted(pages.tolist()) == [1, 2, 3, 4, 5]
    assert pool.alloc(1) is None


def test_a_shortage_takes_nothing() -> None:
    pool = PagePool(1, 3)
    assert pool.alloc(4) is None
    assert pool.available == 3


def test_freeing_twice_is_refused() -> None:
    pool = PagePool(1, 3)
    pages = pool.alloc(2)
    assert pages is not None
    pool.free(pages)
    with pytest.raises(IntegrityError, match="freed twice"):
        pool.free(pages)
    third = pool.alloc(1)
    assert third is not None
    with pytest.raises(IntegrityError, match="freed twice"):
        pool.free(np.concatenate([third, third]))


def test_pages_given_back_to_a_dead_pool_vanish() -> None:
    pool = PagePool(1, 3)
    pages = pool.alloc(2)
    assert pages is not None
    pool.dead = True
    pool.free(pages)
    assert pool.available == 1


def test_sc_11_unpinning_twice_is_refused() -> None:
    pool = HostPool("storage-0", 7, 1, 4)
    pages = pool.alloc(2)
    assert pages is not None
    pool.pin(pages)
    pool.unpin(pages)
    with pytest.raises(IntegrityError, match="unpinned twice"):
        pool.unpin(pages)


@given(st.integers(1, 12), st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=40))
def test_a_pool_behaves_like_a_set_of_free_ids(count: int, actions: list[tuple[bool, int]]) -> None:
    pool, free, held = PagePool(1, count), set(range(1, count + 1)), list[np.ndarray]()
    for takes, size in actions:
        if takes:
            pages = pool.alloc(size)
            assert (pages is None) == (size > len(free))
            if pages is not None:
                assert len(set(pages.tolist())) == size
                assert free.issuperset(pages.tolist())
                free -= set(pages.tolist())
                held.append(pages)
        elif held:
            pages = held.pop(size % len(held))
            pool.free(pages)
            free |= set(pages.tolist())
        assert pool.available == len(free)
        assert set(pool.free_pages().tolist()) == free
