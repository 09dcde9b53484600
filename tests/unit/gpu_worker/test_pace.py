"""A background write rests in proportion, but a stop of its whole process is no reason to rest."""

import pytest

from services.gpu_worker.transfers import MAX_REST_S, PACE, rest_after


def test_a_write_rests_in_proportion_to_its_batch() -> None:
    assert rest_after(0.004) == pytest.approx(0.004 * PACE)


def test_a_batch_that_was_stopped_for_35_s_does_not_rest_for_35_s() -> None:
    assert rest_after(35.0) == MAX_REST_S < 1
