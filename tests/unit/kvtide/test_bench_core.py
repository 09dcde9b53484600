"""`kvtide bench core`: our side does what it claims to time, and a missing peer is named with its remedy."""

from pathlib import Path

import pytest

from kvtide.bench.core import trees, workloads
from kvtide.bench.core.peer import Peer, PeerError


def test_a_served_prompt_is_found_again_and_its_locks_are_gone() -> None:
    first, second = workloads.leaves(2)
    user = trees.TreeUser(page_size=16, tokens=128)
    user.serve(first)
    user.serve(second)
    assert (user.match(first), user.match(second)) == (4, 4)
    assert not user.core.state.tree.locks


def test_a_short_pool_evicts_the_prompt_used_longest_ago() -> None:
    first, second, third = workloads.leaves(3)
    user = trees.TreeUser(page_size=16, tokens=128)
    for prompt in (first, second, third):
        user.serve(prompt)
    assert [user.match(prompt) for prompt in (first, second, third)] == [0, 4, 4]


def test_a_folder_without_the_peer_is_named_with_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=f"bench/peers/setup {tmp_path}"):
        Peer(tmp_path, "s23", tmp_path)
