"""Which kinds the contract suite runs over."""

import pytest

from shared.config import Backend
from tests.backends.conftest import KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_store_03_the_contract_is_kept_by(kind: str) -> None:
    if KINDS[kind]:
        pytest.skip(KINDS[kind])


def test_store_03_every_backend_of_the_configuration_is_in_the_suite() -> None:
    configured = set(Backend.__args__) - {"none", "dynamic"}
    assert configured | {"guide", "hicache"} == set(KINDS)
