"""TREE-09, POLICY-02: what leaves first, by the name of the strategy."""

from typing import get_args

import pytest

from services.scheduler.core.reuse import RESIDENT, frequency_class
from services.scheduler.core.settings import Eviction
from tests.conformance.harness import Harness

PROMPTS = {name: [first, first + 1, 90] for name, first in zip("abcd", (1, 11, 21, 31), strict=True)}
USES = "abcaabd"  # by hits: a 3, b 2, c and d 1; by last use: c a b d
PRIORITY = {"c": 2, "a": 1}
LEAVES_IN_ORDER = {
    "lru": "cabd",
    "lfu": "cdba",
    "fifo": "abcd",
    "mru": "dbac",
    "filo": "dcba",
    "priority": "bdac",
    "slru": "cdab",
    "auto": "cabd",  # before it has learned anything
}


def test_tree_09_every_strategy_has_its_order_here() -> None:
    assert set(LEAVES_IN_ORDER) == set(get_args(Eviction))


@pytest.mark.parametrize("strategy", LEAVES_IN_ORDER)
def test_tree_09_the_device_gives_up_leaves_in_the_order_of_the_strategy(strategy: str) -> None:
    core = Harness(host=0, eviction=strategy)
    for name in USES:
        core.compute(PROMPTS[name], priority=PRIORITY.get(name, 0))
    left, gone = set(PROMPTS), ""
    while left:
        core.evict_device(1)
        (name,) = [name for name in left if not _cached(core, name)]
        left.discard(name)
        gone += name
    assert gone == LEAVES_IN_ORDER[strategy]


@pytest.mark.parametrize("strategy", LEAVES_IN_ORDER)
def test_tree_09_so_does_the_host(strategy: str) -> None:
    core = Harness(eviction=strategy, backend=False)
    for name in USES:
        core.compute(PROMPTS[name], priority=PRIORITY.get(name, 0))
    core.evict_device(4)
    gone = ""
    for _ in PROMPTS:
        core.evict_host(core.pool.available + core.pool.releasing + 1)
        gone += "".join(name for name in PROMPTS if name not in gone and not _cached(core, name))
    assert gone == LEAVES_IN_ORDER[strategy]


def _cached(core: Harness, name: str) -> bool:
    """Asks the tree without touching anything."""
    tokens = PROMPTS[name]
    return any(node.key[:4] == tokens[0].to_bytes(4, "little") for node in core.nodes())


def test_policy_02_a_split_keeps_the_frequency_of_each_page() -> None:
    core = Harness(host=0, eviction="auto")
    core.compute([*range(1, 9), 90])
    core.compute([1, 2, 3, 4, 90])
    core.compute([1, 2, 3, 4, 25, 26, 90])
    assert [(node.pages, node.frequencies) for node in core.match(list(range(1, 9))).device] == [
        (2, b"\3\3"),
        (2, b"\1\1"),
    ]


def test_policy_02_pages_that_were_used_more_often_than_the_end_of_their_node_stay() -> None:
    core = Harness(host=0, eviction="auto")
    core.compute([1, 2, 3, 4, 90])
    core.compute([1, 2, 3, 4, 90])
    core.evict_device(2)
    core.compute([*range(1, 9), 90])  # the sketch remembers the first two pages
    (node,) = core.match(list(range(1, 9))).device
    assert node.frequencies == b"\3\3\1\1"
    core.evict_device(2)
    (node,) = core.match(list(range(1, 9))).device
    assert (node.pages, node.frequencies) == (2, b"\3\3")


def test_policy_02_host_copies_of_resident_nodes_stay_out_of_the_ranking() -> None:
    core = Harness(eviction="auto", backend=False)
    core.compute([1, 2, 3])
    core.compute([11, 12, 13])
    first, second = core.nodes()
    core.evict_device(1)
    gone = first if first.value is None else second
    stays = second if gone is first else first
    assert gone.host_entry is not None
    assert gone.host_entry.key[0] == frequency_class(gone)
    assert stays.host_entry is not None
    assert stays.host_entry.key[0] == RESIDENT
    core.evict_host(core.pool.available + core.pool.releasing + 1)
    assert list(core.nodes()) == [stays]


def test_policy_02_a_page_that_comes_back_is_in_the_class_of_all_its_uses_at_once() -> None:
    core = Harness(host=0, eviction="auto")
    for _ in range(3):
        core.compute([1, 2, 3])
        core.evict_device(1)
    core.compute([1, 2, 3])
    (node,) = core.nodes()
    assert node.device_entry is not None
    assert node.device_entry.key[0] == frequency_class(node) == 3
