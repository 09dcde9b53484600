"""`make test-faults`: every fault in every activity, on real processes (tests/faults/matrix/__main__.py)."""
