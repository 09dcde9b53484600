"""What every test shares: the order of the layers, cheapest first, their markers, and who may run beside whom."""

from pathlib import Path

import pytest

STACKS = ("integration", "faults", "compose")  # each test starts a whole stack: one at a time, whatever runs beside it
LAYERS = ("unit", "conformance", "simulation", "integration", "faults")
TESTS = Path(__file__).parent


def _layer(item: pytest.Item) -> str:
    return item.path.relative_to(TESTS).parts[0]


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in its own
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the layers in order, and mark the tests of `integration` and `faults` by their folder."""
    items.sort(key=lambda item: LAYERS.index(_layer(item)) if _layer(item) in LAYERS else len(LAYERS))
    for item in items:
        if _layer(item) in STACKS:
            item.add_marker(pytest.mark.xdist_group("stack"))
        if _layer(item) in ("integration", "faults"):
            item.add_marker(_layer(item))
