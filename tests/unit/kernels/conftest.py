"""Every test that asks for `version` runs with the C extension and without it."""

import pytest

from kernels import build, native


@pytest.fixture(params=["c", "reference"])
def version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "reference":
        monkeypatch.setattr(native, "load", lambda: (None, "turned off by a test"))
    elif native.load()[0] is None:
        assert build.find_compiler() is None, "a compiler is here: run `python -m kernels.build` before the tests"
        pytest.skip("no C compiler here")
    return request.param
