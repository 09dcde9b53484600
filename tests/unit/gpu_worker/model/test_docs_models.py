"""docs/models.md says what the code does."""

import re
from pathlib import Path

import pytest

from services.gpu_worker.model.config import FAMILIES, ROPE_TYPES
from shared.geometry import PageGeometry, Part

PAGE = Path(__file__).parents[4] / "docs" / "models.md"
ROW = re.compile(r"^\| ([\w.-]+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", re.MULTILINE)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_docs_memory_is_that_of_the_page_geometry(dtype: str) -> None:
    rows = ROW.findall(PAGE.read_text(encoding="utf-8"))
    assert len(rows) == 10
    for name, *numbers in rows:
        layers, kv_heads, head_dim, token_bytes, tokens = map(int, numbers)
        parts = tuple(Part(part, kv_heads, head_dim, dtype) for part in ("k", "v"))
        assert PageGeometry(64, layers, parts).token_bytes == token_bytes, name
        assert 2**30 // token_bytes == tokens, name


def test_docs_name_what_is_supported() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+ForCausalLM)`", text, re.MULTILINE) == list(FAMILIES)
    assert f"`rope_type` other than {' and '.join(f'`{kind}`' for kind in ROPE_TYPES)}" in text
