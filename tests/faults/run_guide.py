"""The test that docs/faults.md shows, as it is there. `make test-faults` runs it; for `make test` it takes too long."""

from tests.docs.examples import examples

[GUIDE] = [each for each in examples("python") if each.page == "faults.md"]
exec(compile(GUIDE.text, str(GUIDE), "exec"), globals())
