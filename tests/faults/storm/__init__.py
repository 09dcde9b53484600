"""Random traffic under random faults: `python -m tests.faults.storm`, and a minute of it in `make test`."""
