"""A minute of random traffic under random faults; `python -m tests.faults.storm --seconds 1800` is half an hour."""

import pytest

from kvtide.oracle_process import Oracle
from tests.faults.storm.storm import storm

pytestmark = pytest.mark.asyncio(loop_scope="session")

SECONDS = 60.0
SEED = 1


@pytest.mark.timeout(480)
async def test_a_minute_of_random_faults_costs_time_and_no_answer(oracle: Oracle) -> None:
    result = await storm(oracle, SECONDS, SEED, remote=True, say=print)
    assert result.failures == []
    assert result.answered > 0
    assert result.faults > 0
