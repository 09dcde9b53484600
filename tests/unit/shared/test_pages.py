"""Geometry, fingerprints, hashes and packed lists: what names a page."""

import hashlib
import os
import subprocess
import sys
from typing import get_args

import pytest

from shared.errors import GeometryError, ProtocolError
from shared.geometry import HostLayout, PageGeometry, Part, model_fingerprint
from shared.packed import pack, unpack
from shared.page_hash import chain, namespace_seed

LAYOUTS = get_args(HostLayout)
LLAMA_3_8B = PageGeometry(64, 32, (Part("k", 8, 128, "bfloat16"), Part("v", 8, 128, "bfloat16")))


def test_page_01_bytes_come_from_the_geometry() -> None:
    assert LLAMA_3_8B.token_bytes == 131_072
    assert LLAMA_3_8B.page_bytes * 16 == 128 * 2**20
    assert LLAMA_3_8B.page_bytes * 2048 == 16 * 2**30


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"page_size": 48}, "48"),
        ({"layers": 0}, "layers=0"),
        ({"parts": ()}, "parts"),
        ({"parts": (Part("k", 1, 1, "int3"),)}, "int3"),
        ({"tp_rank": 1}, "tp_rank 1"),
        ({"tp_size": 2}, "tp_size 2"),
    ],
)
def test_an_impossible_geometry_is_refused(changes: dict[str, object], names: str) -> None:
    values = {"page_size": 64, "layers": 2, "parts": LLAMA_3_8B.parts} | changes
    with pytest.raises(GeometryError, match=names):
        PageGeometry(**values)  # type: ignore[arg-type]


def test_sc_19_20_22_weights_dtype_page_size_and_layout_are_in_the_fingerprint() -> None:
    other_dtype = tuple(Part(part.name, part.heads, part.head_dim, "float16") for part in LLAMA_3_8B.parts)
    others = [
        model_fingerprint(LLAMA_3_8B, b"other weights"),
        model_fingerprint(PageGeometry(32, 32, LLAMA_3_8B.parts), b"weights"),
        model_fingerprint(PageGeometry(64, 32, other_dtype), b"weights"),
        model_fingerprint(PageGeometry(64, 32, LLAMA_3_8B.parts[::-1]), b"weights"),
        *(
            model_fingerprint(PageGeometry(64, 32, LLAMA_3_8B.parts, 0, 1, layout), b"weights")
            for layout in LAYOUTS[1:]
        ),
        model_fingerprint(LLAMA_3_8B, b"weights"),
    ]
    assert len(set(others)) == len(others)
    assert others[-1] == model_fingerprint(LLAMA_3_8B, b"weights")


def test_the_default_namespace_has_the_plain_chain_over_little_endian_tokens() -> None:
    tokens = list(range(1000, 1012))
    first = hashlib.sha256(b"".join(token.to_bytes(4, "little") for token in tokens[:4])).digest()
    second = hashlib.sha256(first + b"".join(token.to_bytes(4, "little") for token in tokens[4:8])).digest()
    assert list(chain(b"", pack(tokens[:11]), 4)) == [first, second]
    assert next(iter(chain(first, pack(tokens[4:]), 4))) == second


def test_sc_21_namespaces_are_framed_fields() -> None:
    seeds = {
        namespace_seed("", "", ""),
        namespace_seed("a", "bc", ""),
        namespace_seed("ab", "c", ""),
        namespace_seed("abc", "", ""),
        namespace_seed("", "abc", ""),
        namespace_seed("", "", "abc"),
    }
    assert len(seeds) == 6
    assert namespace_seed("", "", "") == b""


def test_sc_23_page_keys_are_equal_in_two_processes_with_different_hash_seeds() -> None:
    program = (
        "from shared.page_hash import chain, namespace_seed; from shared.packed import pack;"
        "print([d.hex() for d in chain(namespace_seed('t', 'l', 'x'), pack(range(64)), 16)])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
    assert "[" in outputs.pop()


def test_packed_lists_refuse_what_does_not_fit() -> None:
    assert unpack(pack([0, -1, 2**31 - 1])).tolist() == [0, -1, 2**31 - 1]
    assert unpack(pack([])).tolist() == []
    with pytest.raises(OverflowError):
        pack([2**31])
    with pytest.raises(ProtocolError, match="5 bytes"):
        unpack(b"12345")
