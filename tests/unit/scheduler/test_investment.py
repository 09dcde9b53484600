"""METRIC-02: what came back of what was written."""

from services.scheduler.investment import investment


def test_metric_02_bytes_for_each_token_that_came_back() -> None:
    counters = {
        "host_hit_tokens": 50,
        "host_evicted_unread_pages": 3,
        "recomputed_host_tokens": 64,
        "recomputed_tokens": 96,
    }
    stats = [{"write_bytes": 100.0}, {"write_bytes": 25.0}, {"l3_set_bytes": 80.0, "l3_evicted_unread": 2.0}, {}]
    found = investment(counters, stats)
    assert found["host"] == {
        "written_bytes": 125, "hit_tokens": 50, "bytes_per_hit_token": 2.5, "evicted_unread_pages": 3,
    }  # fmt: skip
    assert found["storage"] == {
        "written_bytes": 80, "hit_tokens": 0, "bytes_per_hit_token": None, "evicted_unread_pages": 2,
    }  # fmt: skip
    assert found["recomputed_tokens"] == {"device": 0, "host": 64, "storage": 0, "any": 96}
