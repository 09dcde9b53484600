"""What every test shares: the order of the layers, cheapest first, their markers, and who may run beside whom."""

from pathlib import Path

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

STACKS = ("integration", "faults", "compose")  # their tests start whole stacks: one after the other, layer by layer
LAYERS = ("unit", "conformance", "simulation", "integration", "faults")
TESTS = Path(__file__).parent

settings.register_profile(
    "kvtide", deadline=None
)  # a busy machine makes any example slow; pytest's timeout ends a hang
settings.load_profile("kvtide")


def _layer(item: pytest.Item) -> str:
    return item.path.relative_to(TESTS).parts[0]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the layers in order, and mark the tests of `integration` and `faults` by their folder."""
    items.sort(key=lambda item: LAYERS.index(_layer(item)) if _layer(item) in LAYERS else len(LAYERS))
    for item in items:
        if _layer(item) in ("integration", "faults"):
            item.add_marker(_layer(item))


class StacksTogether(LoadScopeScheduling):
    """The tests of a layer that start stacks go to one worker; the others go wherever there is time.

    So at most one stack of each layer runs: those of `faults` mostly wait, beside those of `integration`.
    """

    def _split_scope(self, nodeid: str) -> str:
        layer = nodeid.split("/")[1]
        return layer if layer in STACKS else nodeid


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> StacksTogether:
    """xdist asks for it with `-n`."""
    return StacksTogether(config, log)
