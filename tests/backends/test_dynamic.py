"""storage.backend = "dynamic": the guide, and what is said of a class that can't be used."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from services.storage.backends import make_backend
from services.storage.breaker import FAILURES_IN_A_ROW, BreakerBackend
from services.storage.key_value import KeyValueStore, Value
from services.storage.none_backend import NoneBackend
from shared.config import load_config
from shared.errors import StorageError
from tests.backends.guide import guide_code
from tests.unit.storage.pages import GEOMETRY, MODEL, exists, hits, put

HERE = "tests.backends.test_dynamic"


class Liar(KeyValueStore):
    """Answers what no store should."""

    def __init__(self, answer: object = None) -> None:
        self.answer = answer

    async def exists(self, keys: Sequence[str]) -> int:
        return 1000

    async def get(self, keys: Sequence[str], size: int) -> Sequence[Value | None]:
        return self.answer  # type: ignore[return-value]

    async def set(self, keys: Sequence[str], values: Sequence[bytearray]) -> Sequence[bool]:
        return [True] * (len(keys) + 1)

    async def remove(self, keys: Sequence[str]) -> int:
        return 0

    async def clear(self) -> None:
        pass


class OwnBackend(NoneBackend):
    """A whole backend of the user's."""


class Broken(Liar):
    def __init__(self) -> None:
        raise RuntimeError("no licence")


class NotAStore:
    def get(self, key: str) -> None: ...


def make(name: str, *overrides: str) -> BreakerBackend:
    config = load_config(overrides=["storage.backend=dynamic", f"storage.dynamic_class={name}", *overrides])
    backend = make_backend(config, "storage-0")
    assert isinstance(backend, BreakerBackend)
    return backend


def test_the_guides_code_keeps_its_title() -> None:
    assert len([line for line in guide_code().splitlines() if line]) <= 60


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:Store", "can't import 'no_such_module'"),
        (f"{HERE}:Nothing", "has no 'Nothing'"),
        (f"{HERE}:HERE", "not a class"),
        (f"{HERE}:NotAStore", "lacks set, exists, batch_get, batch_set, batch_exists, clear"),
        (f"{HERE}:Broken", "no licence"),
    ],
)
def test_store_03_a_class_that_cannot_be_used_is_refused_by_name(name: str, message: str) -> None:
    with pytest.raises(StorageError, match=message):
        make(name)


def test_store_03_options_that_a_class_does_not_take_are_refused() -> None:
    with pytest.raises(StorageError, match="colour"):
        make(f"{HERE}:Liar", 'storage.options={colour="red"}')


def test_store_03_a_whole_backend_may_be_the_users() -> None:
    assert isinstance(make(f"{HERE}:OwnBackend").inner, OwnBackend)


@pytest.mark.parametrize("answer", ["5", "[]", '["text"]', "[17]"])
async def test_store_07_a_store_that_answers_nonsense_costs_misses(answer: str, tmp_path: Path) -> None:
    backend = make(f"{HERE}:Liar", f"storage.options={{answer={answer}}}")
    await backend.start()
    pages = await backend.of_model(MODEL, GEOMETRY)
    assert await exists(pages, 0) == 1
    for _ in range(FAILURES_IN_A_ROW):
        assert await hits(pages, 0) == [False]
    assert await put(pages, 0) == [False]
    assert backend.stats()["l3_failures"] + backend.stats()["l3_corrupt"] >= FAILURES_IN_A_ROW
    await backend.close()
