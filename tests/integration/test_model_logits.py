"""The default model's logits equal transformers' on real text, cold, in chunks and token by token."""

from pathlib import Path
from typing import Any

import pytest
import torch

from kvtide.default_model import ensure_default_model
from services.gpu_worker.kv_pool import KVPool
from services.gpu_worker.model.batch import ForwardBatch, Segment
from services.gpu_worker.model.llama import Llama
from services.gpu_worker.model.load import load_model
from services.gpu_worker.model.score import score_tokens

TEXT = (
    "The capital of France is Paris. A key-value cache keeps what attention has computed, so that a prompt that "
    "begins like an earlier one need not be computed again. 1, 2, 3, 5, 8, 13, 21: each is the sum of the two before. "
    "def add(a, b):\n    return a + b\n"
)
PAGE = 64
CLOSE = {"atol": 1e-4, "rtol": 0.0}


@pytest.fixture(scope="module")
def folder() -> Path:
    return ensure_default_model()


@pytest.fixture(scope="module")
def model(folder: Path) -> Llama:
    return load_model(folder, "float32")


@pytest.fixture(scope="module")
def ids(folder: Path) -> list[int]:
    from tokenizers import Tokenizer

    return list(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT * 2).ids)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def expected_in_steps(reference: Any, ids: list[int], borders: list[int]) -> torch.Tensor:
    """Transformers in the same steps: where products of other shapes sum in another order, it is up to 1.7e-4 from
    its own answer in one step, and up to 1.0e-4 from float64."""
    found, cache = [], None
    for start, stop in zip([0, *borders], [*borders, len(ids)], strict=True):
        done = reference(torch.tensor([ids[start:stop]]), cache=cache, use_cache=True)
        cache = done.cache
        found.append(done.logits[0])
    return torch.cat(found)


def logits_in_steps(model: Llama, ids: list[int], borders: list[int]) -> torch.Tensor:
    pool = KVPool(model.config.page_geometry(PAGE, "float32"), 8)
    table = torch.tensor([5, 2, 7, 3])
    found = []
    for start, stop in zip([0, *borders], [*borders, len(ids)], strict=True):
        at = torch.arange(start, stop)
        slots = table[at // PAGE] * PAGE + at % PAGE
        segment = Segment(0, stop - start, start, table)
        batch = ForwardBatch(torch.tensor(ids[start:stop]), at, slots, [segment], torch.arange(stop - start))
        found.append(model.forward(batch, pool))
    return torch.cat(found)


@pytest.mark.parametrize("borders", [[], [64, 128], [10, 80, 81, 82, 83, 140]], ids=["cold", "pages", "any"])
def test_logits_equal_transformers(model: Llama, reference: Any, ids: list[int], borders: list[int]) -> None:
    assert 2 * PAGE < len(ids) < 4 * PAGE
    expected = expected_in_steps(reference, ids, borders)
    torch.testing.assert_close(logits_in_steps(model, ids, borders), expected, **CLOSE)


def test_scores_equal_transformers(model: Llama, reference: Any, ids: list[int]) -> None:
    expected = expected_in_steps(reference, ids, [])
    gap, logprob = score_tokens(model, ids, 5)
    wanted = torch.tensor(ids[5:])[:, None]
    chosen = expected[4:-1].gather(1, wanted)[:, 0]
    torch.testing.assert_close(torch.from_numpy(gap), expected[4:-1].amax(1) - chosen, **CLOSE)
    by_softmax = expected[4:-1].log_softmax(-1).gather(1, wanted)[:, 0]
    torch.testing.assert_close(torch.from_numpy(logprob), by_softmax, **CLOSE)


def test_it_knows_the_capital_of_france(model: Llama, folder: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompt = tokenizer.encode("The capital of France is").ids
    best = int(logits_in_steps(model, prompt, [])[-1].argmax())
    assert tokenizer.decode([best]).strip() == "Paris"
