"""STORE-01: a page belongs to one model, SC-19, SC-20 and SC-22."""

import pytest

from shared.errors import StorageError
from shared.geometry import PageGeometry, Part, model_fingerprint
from tests.unit.storage.conftest import MakeStore
from tests.unit.storage.pages import GEOMETRY, MODEL, exists, hits, page_files, put


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(model_fingerprint(GEOMETRY, b"other weights"), id="sc_19_other_weights"),
        pytest.param(
            model_fingerprint(PageGeometry(16, 2, (Part("k", 2, 8, "float16"), Part("v", 2, 8, "float16"))), b"w"),
            id="sc_20_other_dtype",
        ),
        pytest.param(model_fingerprint(PageGeometry(32, 2, GEOMETRY.parts), b"w"), id="sc_22_other_page_size"),
    ],
)
async def test_store_01_another_models_pages_are_misses(make_store: MakeStore, other: bytes) -> None:
    store = await make_store()
    mine = model_fingerprint(GEOMETRY, b"w")
    await put(await store.of_model(mine, GEOMETRY), 0)
    pages = await store.of_model(other, GEOMETRY)
    assert await exists(pages, 0) == 0
    assert await hits(pages, 0) == [False]
    assert await put(pages, 0) == [True]
    assert len(page_files(store.folder)) == 2


async def test_store_01_two_models_whose_names_are_equal_are_told_apart(make_store: MakeStore) -> None:
    store = await make_store()
    await store.of_model(MODEL, GEOMETRY)
    with pytest.raises(StorageError, match="belongs to the model"):
        await store.of_model(MODEL[:16] + b"n" * 16, GEOMETRY)
